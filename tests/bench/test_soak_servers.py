"""benchmarks/soak.py against real servers: nothing is found in a healthy one, and what is planted is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import planted_faults
import pytest
from rich.console import Console

from benchmarks import soak, soak_shrink
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.bench.spec import ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.matrix]
# In so few requests memory, threads and files still grow.
WARM_UP = ("memory grew", "threads are open", "files are open")


def found_in(engine: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, requests: int = 400) -> list[str]:
    """The faults of a run against a server with this fault; what the engine itself says if it ends."""
    make = soak.spec_of

    def spec_of(options: object, models: Path) -> ServerSpec:
        spec = make(options, models)  # type: ignore[arg-type]
        planted = planted_faults.install(models / "planted", fault)
        return replace(spec, environment={**spec.environment, **planted})

    for module in (soak, soak_shrink):
        monkeypatch.setattr(module, "spec_of", spec_of)
    options = soak.parse(["--engine", engine, "--requests", str(requests), "--every", "100", "--out", str(folder)])
    try:
        faults = soak.run(options, Steps(Console())).faults
    except ServerError as error:
        faults = [str(error)]
    return [fault for fault in faults if not any(one in fault for one in WARM_UP)]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_nothing_is_lost(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found_in(engine, "none", tmp_path, monkeypatch)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_leak_is_found(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks for leaks itself, and ends; of vLLM's cache a share stays in use."""
    found = found_in(engine, f"{engine} leak", tmp_path, monkeypatch)
    assert any("leak" in fault if engine == "sglang" else "of the cache are in use" in fault for fault in found), found


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_drift_is_found(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(engine, "drift", tmp_path, monkeypatch, requests=1000)
    assert any("the probes' accept length is" in fault for fault in found), found


def test_a_failing_stream_is_cut_to_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the test that is written of it fails, until the fault is repaired."""
    found = found_in("vllm", "vllm leak of some requests", tmp_path, monkeypatch, requests=60)
    assert any("of the cache are in use" in fault for fault in found), found
    assert soak_shrink.main([str(tmp_path / "soak-vllm.json"), "--out", str(tmp_path)]) == 0
    written = (tmp_path / "test_soak_vllm.py").read_text()
    made: dict[str, Any] = {}
    exec(compile(written, "test_soak_vllm.py", "exec"), made)  # noqa: S102
    (ask,) = made["ASKS"]
    assert ask[1]["logprobs"] == 4
    with pytest.raises(AssertionError):
        made["test_requests_of_a_soak"](tmp_path / "again")
    monkeypatch.undo()
    made["test_requests_of_a_soak"](tmp_path / "repaired")
