"""On a GPU the self-test compares what small batches run and what large ones run: a fault in one of both is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_plugin.kernels import attention, sampling
from eagle_plugin.selftest import cache_kernels, sampling_kernels
from eagle_plugin.selftest.shapes import ModelShape, Sizes, sizes_for
from eagle_plugin.selftest.trial import Trial

triton_tiles = pytest.importorskip("eagle_plugin.kernels.triton_tiles")

CPU = torch.device("cpu")
SMALL = ModelShape(
    heads=4, kv_heads=2, head_dim=32, dtype="float32", vocabulary=600, draft_vocabulary=300, steps=3, topk=4, width=16
)


@pytest.fixture
def sizes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelShape], Sizes]:
    """Those of a GPU with 132 multiprocessors, but for the long contexts."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return lambda model: sizes_for("cuda", model)._replace(prefix=150, table=256)


@pytest.mark.parametrize("narrow", [True, False])
def test_a_fault_in_one_kind_of_attention_is_found(
    narrow: bool, sizes_of_a_gpu: Callable[[ModelShape], Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the kernel that splits a prefix over programs, or in the one that does not."""
    healthy, sizes = attention.tree_attention, sizes_of_a_gpu(SMALL)

    def faulty(*arguments: Any, **options: Any) -> Tensor:
        return healthy(*arguments, **options) + 0.5 * ((arguments[3].shape[1] < 256) is narrow)

    monkeypatch.setattr(attention, "tree_attention", faulty)
    trial = Trial(SMALL, sizes, CPU, 1)
    cache_kernels._tree_attention(trial)
    assert len(trial.differences) == 4
    tile = triton_tiles.tile_for(SMALL.width, SMALL.head_dim, 2, hopper=True)
    for width, is_split in ((sizes_for("cuda", SMALL).table, True), (sizes.narrow[1], False)):
        splits = triton_tiles.splits_for(4, width, 132, tile, part_bytes=2**20)
        assert (splits.most > 1) is is_split


@pytest.mark.parametrize("width", [16, 48, 64])
@pytest.mark.parametrize("divided", [True, False])
def test_a_fault_in_one_kind_of_walk_is_found(
    width: int, divided: bool, sizes_of_a_gpu: Callable[[ModelShape], Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows of logits are divided among blocks (csrc/cuda/sampling.cu), or where they are too many."""
    model = replace(SMALL, width=width)
    healthy = sampling.verify_tree

    def faulty(tree: Any, logits: Tensor, *arguments: Any, **options: Any) -> Any:
        found = healthy(tree, logits, *arguments, **options)
        return found._replace(tokens=found.tokens + ((len(logits) <= 132) is divided))

    monkeypatch.setattr(sampling, "verify_tree", faulty)
    trial = Trial(model, sizes_of_a_gpu(model), CPU, 1)
    sampling_kernels._verify_tree(trial)
    assert len(trial.differences) == 2
