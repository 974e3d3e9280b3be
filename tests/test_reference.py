"""The reference has every environment variable that the code reads, and no other, and the help of every command."""

from __future__ import annotations

import re
from pathlib import Path

from document_commands import ROOT, parsers

from eagle_plugin import cli
from eagle_plugin.traffic.settings import NAMES

NAME = re.compile(r"(?<![A-Z0-9_])EAGLE_[A-Z0-9]+(?:_[A-Z0-9]+)*(?![A-Z0-9_])")
READERS = ("eagle_plugin/**/*.py", "compat/sglang-cpu/src/**/*.py", "setup.py", "environments/make.sh")
ROW = re.compile(r"^\| `(EAGLE_[A-Z0-9_]+)` \| \S", re.MULTILINE)


def names_in_code(root: Path) -> set[str]:
    paths = [path for pattern in READERS for path in root.glob(pattern)]
    return {name for path in paths for name in NAME.findall(path.read_text("utf-8"))} | set(NAMES)


def test_the_reference_has_the_environment_variables_of_the_code() -> None:
    rows = ROW.findall((ROOT / "docs/reference.md").read_text("utf-8"))
    assert len(rows) == len(set(rows))
    assert set(rows) == names_in_code(ROOT)


def test_a_name_in_the_code_is_found(tmp_path: Path) -> None:
    (tmp_path / "eagle_plugin/learning/data").mkdir(parents=True)
    code = 'os.environ.get("EAGLE_NEW")  # P_EAGLE_LAYERS\nname = f"EAGLE_CAPTURE_{part}"; EAGLE = EAGLE_A1_B2'
    (tmp_path / "eagle_plugin/learning/data/new.py").write_text(code)
    assert names_in_code(tmp_path) - set(NAMES) == {"EAGLE_NEW", "EAGLE_A1_B2"}


def test_other_documents_name_no_other_variables() -> None:
    known = names_in_code(ROOT)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert set(NAME.findall(path.read_text("utf-8"))) <= known, path.name


def test_every_command_has_its_help() -> None:
    named = [name for name, _ in parsers().all_parsers()]
    assert len(named) == len(set(named))
    wanted = {*cli.OWN_PARSERS, "models", "check", "version"}
    assert wanted <= {name.split()[0] for name in named}
    assert {f"data {step}" for step in cli.DATA_COMMANDS} <= set(named)
    assert {"optimize", "optimize create", "capture export", "models get"} <= set(named)
    text = parsers().all_help()
    assert [f"## eagle-plugin {name}" in text for name in named] == [True] * len(named)
    assert "--aux-layers" in text and "| `--port PORT` | default: a free port |" in text
