"""The captured functions of vLLM's decode step on fake CUDA tensors; test_fake_cuda.py has the steps without graphs."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda, require_cuda
from vllm_fake_cuda import (
    BLOCK,
    HIDDEN,
    SHAPE,
    VOCABULARY,
    B,
    Head,
    attention_layer,
    caches,
    metadata,
    read,
    table,
)

from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.attention import TreeMetadata
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.sampling import sampling_params
from eagle_plugin.vllm.step_functions import TargetForward


def target_attention(layers: dict[str, TreeMetadata], tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The attention of a target's layers over these rows."""
    require_cuda("tokens", tokens)
    require_cuda("positions", positions)
    n = len(tokens)
    assert list(layers) == ["a layer", "another"] and n == len(positions)
    q, k = torch.zeros(n, 4, 64, device=CUDA), torch.zeros(n, 2, 64, device=CUDA)
    for built in layers.values():
        assert len(built.slots) == n
        attention_layer().forward(None, q, k, k, torch.zeros(20, 2, BLOCK, 128, device=CUDA), built, q)
    return q


@pytest.mark.parametrize("parallel", [False, True], ids=["levels one by one", "all levels at once"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_captured_functions(library: FakeLibrary, greedy: bool, parallel: bool) -> None:
    """What is captured, and what is copied into its memory and out of it; three requests are padded to four.

    Each shape is verified once, and another one drafted then.
    """
    head, zeros = Head(), torch.zeros(B, dtype=torch.int64, device=CUDA)
    head._draft_attn_layer_names = {"layer"}
    if parallel:
        head.levels = HeadLevels(MaskRow(7, torch.zeros(1, HIDDEN, device=CUDA)))
    target = torch.zeros(1, VOCABULARY, device=CUDA), torch.zeros(1, 3 * HIDDEN, device=CUDA)
    rows = torch.zeros(100, dtype=torch.int64, device=CUDA)
    ranks = RankAgreement(SimpleNamespace(world_size=1), 4, SHAPE.max_accept_length, CUDA)
    forward = TargetForward(target_attention, rows.int(), rows, {"layer": ["a layer", "another"]})
    step = DecodeStep(head, [CacheGroup("layer", caches())], SHAPE, target, 100, {"layer": 0}, ranks, forward)
    # As a graph that runs nothing: what the function of the capture returned.
    capturer: Any = SimpleNamespace(capture=lambda function: (SimpleNamespace(replay=lambda: None), function()))
    step.capture(capturer, captured_shapes(SHAPE), [4], lambda *_: contextlib.nullcontext())
    params, keys = sampling_params(metadata(greedy), None, B, VOCABULARY, CUDA), None if greedy else zeros
    shapes = captured_shapes(SHAPE)[1:]
    for verified, drafted in zip(shapes, reversed(shapes), strict=True):
        counts = [verified.width - 1] * B
        batch = read(counts, [verified.width] * B, verified)
        slots = torch.zeros(B * verified.width, dtype=torch.int64, device=CUDA)
        step.begin(batch, {"layer": TreeMetadata(batch.rows(), table(), slots)})
        assert step.can_verify() and all_on_cuda(step.verify())
        accepted, tokens = step.walk(batch, torch.zeros(len(slots), VOCABULARY, device=CUDA), params, keys)
        paths = Accepted(*(x.clone() for x in accepted))
        assert step.can_extend(paths, drafted, greedy)
        root = step.extend(paths, [torch.zeros(len(slots), HIDDEN, device=CUDA)] * 3, greedy)
        trees = DraftBatch(drafted, root.lengths, table(), params, keys, None)
        assert step.can_draft(trees, root.state)
        assert root.state.top.logp.dim() == (3 if parallel else 2)
        drafts = step.draft_tree(trees, root.tokens, root.state)
        assert drafts.tree.tokens.shape == (B, drafted.width)
        assert all_on_cuda(tokens, *accepted, *drafts.tree) and len(tokens) == B
        own = drafts.clone()
        assert step.holds(drafts) and not step.holds(own)
        own_state = HeadState(TopM(*(x.clone() for x in root.state.top)), root.state.hidden.clone())
        step.draft_tree(trees, zeros, own_state)
