"""The forks that most tests ask: which servers are forked, and that a fork ends and complains as a server does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from server_forks import ForkedServer, can_fork
from serving import GRAPHS, serving, tiny_spec, vllm_spec
from tiny_models import tiny_eagle3_head, tiny_llama

from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.bench.spec import ServerSpec

pytest.importorskip("sglang")
TARGET, HEAD = Path("target"), Path("head")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (tiny_spec(TARGET), True),
        (tiny_spec(TARGET, HEAD, environment=GRAPHS), True),
        (tiny_spec(TARGET, threads=2), False),  # read when torch is imported
        (tiny_spec(TARGET, HEAD, environment={"EAGLE_KERNELS": "torch"}), False),
        (tiny_spec(TARGET, device="cuda"), False),
        (vllm_spec(TARGET), False),
    ],
)
def test_a_server_is_forked_where_its_variables_are_read_late(spec: ServerSpec, expected: bool, tmp_path: Path) -> None:
    assert can_fork(Server.of(spec, tmp_path, 1)) == expected


@pytest.mark.server
def test_a_fork_that_cannot_start_says_why(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m sglang.launch_server` does, see test_refusals.py; and the next fork is none the worse for it."""
    head = tiny_eagle3_head(tmp_path / "head", tiny_llama(tmp_path / "other", hidden=96, heads=6, kv_heads=2))
    refused = r"ended with exit code 1 before it was ready(.|\n)*\| eagle-plugin: .*hidden_size 96, "
    with pytest.raises(ServerError, match=refused), serving([tiny_spec(tiny_target, head)], tmp_path / "wrong"):
        pytest.fail("it started")
    (log,) = tmp_path.glob("wrong/0/*.log")
    assert "Traceback" not in log.read_text()
    with serving([tiny_spec(tiny_target)], tmp_path / "right") as (server,):
        assert isinstance(server, ForkedServer)
        processes = server.members()
        assert len(processes) >= 3
        monkeypatch.setenv("SGLANG_OTHER", "1")  # too late for what was imported
        assert not can_fork(Server.of(tiny_spec(tiny_target), tmp_path, 1))
    running = [process.pid for process in psutil.process_iter(["status"]) if process.info["status"] != "zombie"]
    assert not set(running) & set(processes)
