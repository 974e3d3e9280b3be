"""What the hosts of several ranks decide together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle_plugin.runtime.graphs import Buckets


@pytest.mark.parametrize("flags, dropped", [([False, False], []), ([False, True], [2]), ([True, True], [2])])
def test_a_size_without_memory_in_one_rank_is_captured_in_none(
    flags: list[bool], dropped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = pytest.importorskip("eagle_plugin.sglang.capture")
    from sglang.srt import runtime_context

    gathered = []

    def gather(values: list[bool], mine: bool, group: str) -> None:
        assert group == "hosts"
        gathered.append(mine)
        values[:] = flags

    group = SimpleNamespace(world_size=2, rank_in_group=0, cpu_group="hosts")
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    sizes = Buckets([1, 2])
    with capture.graph_memory("cpu").tried(sizes, 2):
        if flags[0]:
            raise torch.OutOfMemoryError
    assert gathered == [flags[0]]
    assert [size for size in (1, 2) if size not in sizes] == dropped
