"""Running peers (tests/support/peer.py) for the tests of the client."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eagle_plugin.bench import choices
from eagle_plugin.bench.servers import Server, free_port

PEER = Path(__file__).parents[1] / "support/peer.py"


@pytest.fixture(scope="session")
def pace() -> tuple[float, float]:
    """Seconds that a peer waits before the first word of an answer, and before each other word."""
    names = runpy.run_path(str(PEER), run_name="peer")
    return names["FIRST_S"], names["GAP_S"]


@pytest.fixture
def any_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder is a head of every target, in a test whose servers read none."""
    monkeypatch.setattr(choices, "check_fits", lambda *_: None)


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A function that starts one more peer process; all of them are stopped after the test."""
    with ExitStack() as stack:

        def start(label: str = "peer", *flags: str) -> Server:
            port = free_port()
            command = [sys.executable, str(PEER), str(port), *flags]
            return stack.enter_context(Server(command, port, label, tmp_path / f"{label}.log", os.environ))

        yield start


@pytest.fixture
def peer(start_peer: Callable[..., Server]) -> Server:
    """One peer that is ready."""
    server = start_peer()
    server.wait_ready(30)
    return server
