"""`make contract`: what a release changes of the names that the plugin touches, from wheels of a made-up index."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("contract", ROOT / "tools/contract.py")
assert SPEC is not None and SPEC.loader is not None
tool = sys.modules["contract"] = importlib.util.module_from_spec(SPEC)  # pydantic looks there
SPEC.loader.exec_module(tool)

OLD = "class Runner:\n    def step(self, batch): return batch\n    def draw(self, logits): ...\n    size = 1\n"
NEW = "class Runner:\n    def step(self, batch): return 2 * batch\n    def draw(self, logits, mode): ...\nLATE = 1\n"
WANTED = {
    "vllm.Runner": "",
    "vllm.Runner.step": "self batch",
    "vllm.Runner.draw": "self logits",
    "vllm.Runner.size": "",
    "vllm.LATE": "",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An index of one-file wheels by version, in the place of pip's."""
    releases = {"0.33.0": OLD, "0.34.0": NEW, "0.34.1": OLD + "LATE = 1\n"}

    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        version = command[-1].removeprefix("vllm==")
        folder = Path(command[command.index("--dest") + 1])
        if version not in releases:
            return subprocess.CompletedProcess(command, 1, "", f"ERROR: No matching distribution found for {version}\n")
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"vllm-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", releases[version])
            wheel.writestr("vllm/_C.so", "not read")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tool.subprocess, "run", download)
    monkeypatch.setattr(tool, "wanted_of", lambda engine: WANTED)
    return releases


def test_what_changed(index: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["vllm", "0.34.0", "--base", "0.33.0", "--out", str(tmp_path)]) == 1
    document = json.loads((tmp_path / "contract-vllm-0.34.0.json").read_text())
    kinds = {one["name"].removeprefix("vllm."): one["change"] for one in document["changes"]}
    assert kinds == {
        "Runner.size": "gone", "LATE": "new", "Runner.draw": "parameters", "Runner": "body", "Runner.step": "body",
    }  # fmt: skip
    wanted = ["vllm.Runner.draw takes (self, logits, mode), wanted (self, logits)", "vllm.Runner.size is gone"]
    assert sorted(document["wanted"]) == wanted
    printed = capsys.readouterr().out
    assert "5 names: 1 gone, 1 new, 1 parameters, 2 body" in printed and f"wanted otherwise: {wanted[1]}" in printed


def test_a_release_that_changes_nothing(index: dict[str, str], tmp_path: Path) -> None:
    assert tool.main(["vllm", "0.34.1", "--base", "0.33.0", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "contract-vllm-0.34.1.json").read_text())
    assert document["wanted"] == [] and document["names"] == {"new": 1, "same": 4}


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.99.0", "vllm 0.99.0 cannot be fetched from the package index: ERROR: No matching"), ("new est", "VERSION is")],
)
def test_a_release_that_is_not_there(
    version: str, message: str, index: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["vllm", version, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.json"))


def test_the_names_of_both_engines_are_found() -> None:
    for engine in tool.ENGINES:
        names = tool.wanted_of(engine)
        assert len(names) > 150 and all(name.startswith(f"{engine}.") for name in names)
    assert "sglang.srt.layers.layernorm.RMSNorm.forward_native" in tool.wanted_of("sglang")
