"""Inside eagle_plugin/learning/data imports go down only, in the order that its docstring gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import eagle_plugin.learning.data

PACKAGE = "eagle_plugin.learning.data"
FOLDER = Path(eagle_plugin.learning.data.__file__).parent
COMMANDS = {"builtin", "named_set", "prepare", "generate", "collect", "render", "vocabulary", "extract", "verify"}
# From the bottom; parts of one set do not import each other.
ORDER = [
    {"rows"},
    {"target_files"},
    {"masks", "dialogues", "target_identity", "answer_faults", "provenance"},
    {"sources"},
    {"privacy"},
    {"traffic", "generation", "preparation_stats", "prepare_options", "store"},
    {"collecting"},
    COMMANDS,
]


def part_of(module: str) -> str:
    """The sub-folder or the module of the top folder that a module belongs to."""
    return module.removeprefix(f"{PACKAGE}.").split(".")[0]


def imports_between_parts(folder: Path) -> Iterator[tuple[str, str]]:
    """(importing part, imported part) for every import of another part, also inside functions."""
    for path in sorted(folder.rglob("*.py")):
        importer = path.relative_to(folder).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith(f"{PACKAGE}.") and part_of(name) != importer:
                    yield importer, part_of(name)


def violations(imports: Iterator[tuple[str, str]]) -> set[tuple[str, str]]:
    level = {part: number for number, parts in enumerate(ORDER) for part in parts}
    return {(importer, imported) for importer, imported in imports if level[imported] >= level[importer]}


def test_every_module_has_a_place_in_the_order():
    parts = {path.relative_to(FOLDER).with_suffix("").parts[0] for path in FOLDER.rglob("*.py")} - {"__init__"}
    assert parts == set().union(*ORDER)
    for part in parts:
        assert part in (eagle_plugin.learning.data.__doc__ or ""), f"{part} is not in the docstring of {PACKAGE}"


def test_imports_go_down():
    assert violations(imports_between_parts(FOLDER)) == set()


def test_an_import_that_goes_up_is_found(tmp_path: Path):
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "a.py").write_text(
        "def f():\n    from eagle_plugin.learning.data.privacy.redact import scan\n"
    )
    (tmp_path / "store").mkdir()
    both = "import eagle_plugin.learning.data.generation.chat\nfrom eagle_plugin.learning.data import rows\n"
    (tmp_path / "store" / "b.py").write_text(both)
    (tmp_path / "rows.py").write_text("from eagle_plugin.learning.data import masks\n")
    found = violations(imports_between_parts(tmp_path))
    assert found == {("sources", "privacy"), ("store", "generation"), ("rows", "masks")}
