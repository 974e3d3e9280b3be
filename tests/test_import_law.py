"""Who may import whom: imports point down, serving and learning never meet, an engine's names stay in its adapter.

Read from the source of every module: imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
COMPAT = ROOT / "compat/sglang-cpu/src"

# Room -> what its modules may import, besides their own room, `common` and the package's `__init__`. An entry with a
# dot that is no room allows one part of a room. The floors are those of docs/design.md.
LAW: dict[str, set[str]] = {
    "common": set(),
    "core": set(),
    "models": set(),
    "traffic": set(),  # runs in a server; its writer is a process of its own, in `learning.data`
    "collect": {"traffic"},  # the same
    "policy": {"core"},
    "heads": {"core", "models", "policy.shapes"},
    # What trees it asks the servers for, what the files of target and head say, and what a server's policy reports.
    "bench": {
        "core.shape",
        "policy.draft_times",
        "policy.metric_table",
        "policy.prediction_errors",
        "policy.report",
        "policy.shapes",
        "heads.block_config",
        "heads.block_drafter",
        "heads.checkpoint",
        "heads.files",
        "heads.kinds",
        "heads.manifest",
        "heads.target_config",
        "heads.target_table",
        "heads.vllm_rules",
        "models",
    },
    # What it asks the servers, which heads it starts them with, and what their manifests say.
    "bench.states": {"bench", "models", "learning.data.sources", "heads.files", "heads.kinds", "heads.manifest"},
    "kernels": {"core"},
    "runtime": {"core", "policy", "heads", "kernels", "collect"},
    "selftest": {"core", "kernels", "runtime"},
    "sglang": {"core", "policy", "heads", "kernels", "runtime", "selftest", "traffic", "collect"},
    "vllm": {"core", "policy", "heads", "kernels", "runtime", "selftest", "traffic", "collect"},
    # The halves that know an engine run in processes of their own.
    "doctor": {
        "kernels",
        "runtime.startup",
        "runtime.verdict",
        "selftest.record",
        "sglang.version",
        "vllm.version",
    },
    "learning.data": {"models", "traffic", "collect"},
    "learning.reference": {"core", "heads"},
    "learning.evaluate": {"core", "policy.shapes", "heads", "learning.data", "models", "learning.reference"},
    "learning.train": {"core", "heads", "learning.data", "models"},
    "learning.report": {"bench", "bench.states"},
    "learning.deploy": {"heads", "models", "bench", "learning.data.traffic", "sglang.version", "vllm.version"},
    # The other sub-commands run in processes of their own.
    "learning.jobs": {
        "collect.settings",  # the forms of stored states
        "learning.data",
        "bench",
        "bench.states",
        "learning.report",
        "models",
        "learning.train.recipe",
        "learning.train.sizes",
    },
    "learning": {"learning.jobs.job"},  # what Python programs import
    # The same; of data and evaluation what prompts and captures are, and how a chat becomes token ids.
    "learning.loop": {
        "bench",
        "bench.states",
        "collect.settings",
        "learning.data",
        "learning.evaluate.responses",
        "models",
        "learning.jobs",
        "learning.train.recipe",
    },
    "cli": {"models", "heads", "kernels", "learning.evaluate", "sglang", "vllm", "doctor"},
}
COMPAT_MAY_IMPORT = {"core", "kernels"}
# An engine's package -> the only room that may import it.
ENGINES = {"sglang": "sglang", "sgl_kernel": "sglang", "vllm": "vllm"}
SERVING = {"runtime", "sglang", "vllm", "kernels", "selftest"}
LEARNING = {f"learning.{part}" for part in ("loop", "jobs", "train", "data", "evaluate", "reference")}
GROUND = {"", "common"}  # what every room may import


class Import(NamedTuple):
    """One import statement's target."""

    importer: str  # dotted name of the module
    imported: str  # dotted name of a module, or of a package outside
    line: int
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_names(folder: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of the package in `folder`."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, known: Iterable[str]) -> Iterator[Import]:
    """Everything that a module imports, at any depth of its source; names of `known` are resolved to modules."""
    known = set(known)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        yield from (Import(module, name, node.lineno, id(node) in inside) for name in dict.fromkeys(names))


def imports_in(folder: Path) -> list[Import]:
    modules = module_names(folder)
    return [found for name, path in sorted(modules.items()) for found in imports_of(name, path, modules)]


def room_of(module: str, law: Mapping[str, set[str]]) -> str:
    """The longest room of the law that holds a module, "" for the package; KeyError for a folder without a law."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in law:
            return ".".join(parts[:end])
    if len(parts) > 1:
        raise KeyError(f"{module} is in no room: add a line for {parts[0]} to LAW")
    return ""


def allows(rooms: set[str], imported: str, room: str) -> bool:
    """Whether rooms, or parts of rooms, hold an imported module, which is in `room`."""
    inside = imported.partition(".")[2]
    return room in rooms or any("." in part and f"{inside}.".startswith(f"{part}.") for part in rooms)


def violations(imports: Iterable[Import], law: Mapping[str, set[str]], package: str) -> list[str]:
    """The imports that the law forbids, one line each."""
    found = []
    for one in imports:
        room = room_of(one.importer, law)
        top = one.imported.partition(".")[0]
        if top == package:
            target = room_of(one.imported, law)
            if target not in GROUND | {room} and not allows(law.get(room, set()), one.imported, target):
                found.append(f"{one}: {room or 'the package'} may import {sorted(law.get(room, set())) or 'nothing'}")
        elif top in ENGINES and room != ENGINES[top]:
            found.append(f"{one}: only {ENGINES[top]} may")
    return found


def circles(imports: Iterable[Import]) -> set[frozenset[str]]:
    """Groups of modules that import each other, directly or through others."""
    imports = list(imports)
    modules = {one.importer for one in imports}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for one in imports:
        if one.imported in modules and one.imported != one.importer:
            edges[one.importer].add(one.imported)
    reached = {module: _reach(module, edges) for module in modules}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in modules
        if module in reached[module]
    }


def _reach(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    queue = [*edges[start]]
    while queue:
        module = queue.pop()
        if module not in found:
            found.add(module)
            queue += edges[module]
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_in(ROOT / "eagle_plugin")


def test_imports_point_down(imports: list[Import]) -> None:
    assert len(imports) > 500
    assert not violations(imports, LAW, "eagle_plugin")


def test_every_room_of_the_law_exists(imports: list[Import]) -> None:
    importers = {one.importer for one in imports} | {one.imported for one in imports}
    assert set(LAW) == {room_of(module, LAW) for module in importers if module.startswith("eagle_plugin.")} - {""}


def test_serving_and_learning_never_import_each_other() -> None:
    """Of the law itself: nothing that either may import, through any number of rooms, is of the other."""
    parts = {part for may in LAW.values() for part in may}
    room_of_part = {part: room_of(f"eagle_plugin.{part}", LAW) for part in parts}
    rooms = {room: {room_of_part[part] for part in may} for room, may in LAW.items()}
    for side, other in ((SERVING, LEARNING), (LEARNING, SERVING)):
        for room in side:
            assert not _reach(room, rooms) & other, room
    assert "vllm" not in _reach("sglang", rooms)
    assert "sglang" not in _reach("vllm", rooms)
    assert not any(room in _reach(room, rooms) for room in rooms)


def test_there_is_no_circle(imports: list[Import]) -> None:
    assert circles(imports) == set()


def test_sub_commands_are_imported_when_they_run(imports: list[Import]) -> None:
    at_once = [one.imported for one in imports if one.importer == "eagle_plugin.cli" and not one.lazy]
    ours = [name for name in at_once if name.startswith("eagle_plugin.")]
    assert ours and [name for name in ours if room_of(name, LAW) not in GROUND] == []


def test_compat_imports_kernels_only() -> None:
    """The distribution of compat/sglang-cpu is for SGLang alone, so it may import that too."""
    used = [one for one in imports_in(COMPAT / "eagle_sglang_cpu") if one.imported.startswith("eagle_plugin")]
    used += [one for one in imports_in(COMPAT / "sgl_kernel") if one.imported.startswith("eagle_plugin")]
    known = module_names(ROOT / "eagle_plugin")
    assert used
    for one in used:
        assert one.imported in known, str(one)
        assert room_of(one.imported, LAW) in COMPAT_MAY_IMPORT, str(one)


# ---------------------------------------------------------------------------------------------------------------------
# Controls: a package that breaks the law

HOUSE = {
    "__init__.py": "",
    "errors.py": "",
    "core/__init__.py": "",
    "core/shape.py": "class Shape: ...\n",
    "core/rule.py": "from house.core.shape import Shape\n",
    "data/__init__.py": "",
    "data/rows.py": "from house.errors import UserError\n",
    "bench/__init__.py": "",
    "bench/load.py": "from house.core.shape import Shape\nimport json, vllm_metrics\n",
    "runtime/__init__.py": "",
    "sglang/__init__.py": "",
    "sglang/worker.py": "import sglang.srt\nfrom house.core import rule, shape\n",
    "vllm/__init__.py": "",
    "vllm/worker.py": "from vllm import LLM\n",
}
HOUSE_LAW: dict[str, set[str]] = {
    "core": set(),
    "data": set(),
    "bench": {"core.shape"},
    "runtime": {"core"},
    "sglang": {"core", "runtime"},
    "vllm": {"core", "runtime"},
}


def build(folder: Path, changes: Mapping[str, str]) -> list[Import]:
    """The imports of HOUSE with lines added to some of its files."""
    house = folder / "house"
    for name, text in HOUSE.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text + changes.get(name, ""))
    for name in changes.keys() - HOUSE:
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(changes[name])
    return imports_in(house)


def test_a_lawful_package_passes(tmp_path: Path) -> None:
    found = build(tmp_path, {})
    assert violations(found, HOUSE_LAW, "house") == [] and circles(found) == set()


@pytest.mark.parametrize(
    ("name", "line", "wanted"),
    [
        ("core/rule.py", "from house.data.rows import Row\n", "house.core.rule:2 imports house.data.rows: core may"),
        ("core/rule.py", "def f():\n    import house.data.rows\n", "house.core.rule:3 imports house.data.rows"),
        ("core/rule.py", "if TYPE_CHECKING:\n    from house.data import rows\n", ":3 imports house.data.rows"),
        ("core/rule.py", "from ..data import rows\n", "house.core.rule:2 imports house.data.rows"),
        ("core/__init__.py", "from ..data.rows import Row\n", "house.core:1 imports house.data.rows"),
        ("errors.py", "from house.core import shape\n", "house.errors:1 imports house.core.shape: the package may"),
        ("bench/load.py", "from house.core.rule import verify\n", "bench may import ['core.shape']"),
        ("bench/load.py", "from house.core import shape_of_things\n", "imports house.core: bench may"),
        ("bench/load.py", "import vllm\n", "imports vllm: only vllm may"),
        ("sglang/worker.py", "from house.vllm import worker\n", "imports house.vllm.worker"),
        ("sglang/worker.py", "def f():\n    from vllm import LLM\n", "imports vllm: only vllm may"),
        ("runtime/__init__.py", "from house.sglang import worker\n", "imports house.sglang.worker"),
    ],
)
def test_what_the_law_forbids_is_found(name: str, line: str, wanted: str, tmp_path: Path) -> None:
    (found,) = violations(build(tmp_path, {name: line}), HOUSE_LAW, "house")
    assert wanted in found


def test_a_folder_without_a_law_is_found(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="add a line for attic to LAW"):
        violations(build(tmp_path, {"attic/box.py": "import json\n"}), HOUSE_LAW, "house")


def test_circles_are_found(tmp_path: Path) -> None:
    """Of two modules, one of them lazily, and of three."""
    two = {"core/shape.py": "def f():\n    from house.core.rule import verify\n"}
    assert circles(build(tmp_path / "two", two)) == {frozenset({"house.core.rule", "house.core.shape"})}
    three = {
        "data/a.py": "import house.data.b",
        "data/b.py": "from house.data import c",
        "data/c.py": "from .a import x",
    }
    assert circles(build(tmp_path / "three", three)) == {frozenset(f"house.data.{name}" for name in "abc")}
