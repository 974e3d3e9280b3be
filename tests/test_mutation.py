"""The tool that counts which changes of the sources the tests find: it tells a found change from one that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE, TESTS = "eagle_plugin/core/shape.py", "tests/core/test_shape.py"
GENERATOR = ROOT / ".venv-mutation/bin/python"


@pytest.mark.parametrize(
    "found",
    [
        "raise ImportError",
        pytest.param("while True:\n    pass", marks=pytest.mark.matrix),  # waits until its time is over
    ],
)
def test_changes_that_tests_find_are_counted(tmp_path: Path, found: str) -> None:
    """Beside one that no test can find."""
    source, generator, report = (ROOT / FILE).read_text(), tmp_path / "generator", tmp_path / "report.json"
    sources = {"found": f"{source}\n{found}\n", "harmless": f"{source}\nUNUSED = 1\n"}
    mutants = [{"path": FILE, "operator": name, "source": changed} for name, changed in sources.items()]
    generator.write_text(f"#!{sys.executable}\nprint({json.dumps({'of': 2, 'mutants': mutants})!r})\n")
    generator.chmod(0o755)
    command = [sys.executable, "tools/mutation.py", "--files", FILE, "--tests", TESTS]
    subprocess.run([*command, "--generator", generator, "--json", report], cwd=ROOT, check=True, timeout=300)
    document = json.loads(report.read_text())
    assert (document["drawn"], document["killed"]) == (2, 1)
    survivors = [(of["path"], of["operator"], of["change"]) for of in document["survivors"]]
    assert survivors == [(FILE, "harmless", "+\n+UNUSED = 1")]
    assert (ROOT / FILE).read_text() == source


@pytest.mark.matrix  # needs cosmic-ray, which `make mutation` installs
@pytest.mark.skipif(not GENERATOR.is_file(), reason="make .venv-mutation has cosmic-ray")
def test_mutants_change_what_runs(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from __future__ import annotations\n\n\ndef half(n: int | None = None) -> int | None:\n    return n // 2\n"
    )
    command = [GENERATOR, "tools/mutants.py", file, "--count", "1000"]
    drawn = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    assert drawn["of"] == len(drawn["mutants"]) > 5
    for mutant in drawn["mutants"]:
        assert "int | None = None) -> int | None" in mutant["source"] and "n // 2\n" not in mutant["source"]
