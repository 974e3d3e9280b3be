"""A first round or a capture that raises costs the trees, and never the server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import skewed_mask
import torch
from serving import answers_of_own_worker

from eagle_plugin.common.errors import UserError
from eagle_plugin.runtime.ranks import RankMissing
from eagle_plugin.selftest.failure import LeftOut

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


def test_a_head_whose_map_names_a_token_twice_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that the engine fetches by its name, nobody has looked at the map before."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from eagle_plugin.sglang import worker as module

    done: list[list[str]] = []
    monkeypatch.setattr(EAGLEWorkerV2, "init_cuda_graphs", lambda self: None)
    monkeypatch.setattr(module, "use_huge_pages", lambda _: None)
    monkeypatch.setattr(module, "rank_logger", lambda logger: logger)
    monkeypatch.setattr(module, "prepared", lambda _: done.append(["prepared"]) or ["no round"])
    monkeypatch.setattr(module, "check_rounds", lambda _, failed: done.append(list(failed)))
    for ids in ([3, 1, 3], [3, 1, 2]):
        worker = object.__new__(module.TreeWorker)
        drafter = SimpleNamespace(hot_token_id=torch.tensor(ids))
        vars(worker).update(device="cpu", req_to_token_pool=None, _draft_worker=drafter)
        worker.init_cuda_graphs()
    (left,), *healthy = done
    assert left.startswith("the draft head has d2t that maps 3 draft ids to 2 target ids")
    assert isinstance(left, LeftOut), "it would be kept for the next start"
    assert healthy == [["prepared"], ["no round"]]
