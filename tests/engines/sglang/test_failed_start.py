"""A first round or a capture that raises costs the trees, and never the server."""

from __future__ import annotations

from pathlib import Path

import pytest
import skewed_mask
from serving import answers_of_own_worker

from eagle_plugin.common.errors import UserError
from eagle_plugin.runtime.ranks import RankMissing

pytest.importorskip("sglang")

from eagle_plugin.sglang import selftest


@pytest.mark.server
@pytest.mark.matrix
def test_after_a_capture_that_raises_the_engines_own_worker_serves(
    tiny_target: Path, tiny_eagle3: Path, tmp_path: Path
) -> None:
    fault = skewed_mask.install(tmp_path / "plugin", "failing_capture:register") | {"EAGLE_SELFTEST": "0"}
    _, log = answers_of_own_worker(tiny_target, tiny_eagle3, fault, tmp_path)
    lines = [line for line in log.splitlines() if "is served by SGLang's own worker" in line]
    assert len(lines) == 1 and "a first round failed: the graph pool has no id" in lines[0]


def test_the_reason_is_told_and_what_the_user_can_correct_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "gather_objects", lambda value: [[], value])  # as of two ranks

    def refused() -> None:
        raise UserError("correct it")

    def alone() -> None:
        raise RankMissing("another rank may have no memory")

    def fails() -> None:
        raise AssertionError("one\ntwo")

    assert selftest.prepared(lambda: None) == []
    assert selftest.prepared(fails) == ["a first round failed: one"]
    with pytest.raises(UserError, match="correct it"):
        selftest.prepared(refused)
    with pytest.raises(RankMissing):  # the other rank would not answer
        selftest.prepared(alone)
