"""The captured functions of vLLM's decode step on fake CUDA tensors; test_fake_cuda.py has the steps without graphs."""

from __future__ import annotations

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
    BlockHead,
    Head,
    attention_layer,
    caches,
    linear_layer,
    metadata,
    read,
    run_linear_layer,
    table,
)

from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.attention import TreeMetadata
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.linear_attention import LinearLayers, LinearMetadata
from eagle_plugin.vllm.linear_step import LinearStep
from eagle_plugin.vllm.sampling import sampling_params
from eagle_plugin.vllm.step_functions import TargetForward


def target_attention(layers: dict[str, TreeMetadata], tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The attention of a target's layers over these rows."""
    require_cuda("tokens", tokens)
    require_cuda("positions", positions)
    n = len(tokens)
    assert n == len(positions)
    q, k = torch.zeros(n, 4, 64, device=CUDA), torch.zeros(n, 2, 64, device=CUDA)
    for name in ("a layer", "another"):
        built = layers[name]
        assert len(built.slots) == n
        attention_layer().forward(None, q, k, k, torch.zeros(20, BLOCK, 2, 128, device=CUDA).transpose(1, 2), built, q)
    return q


@pytest.mark.parametrize("levels", ["one by one", "all at once", "by a block", "after each token"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_captured_functions(library: FakeLibrary, greedy: bool, levels: str) -> None:
    """What is captured, and what is copied into its memory and out of it; three requests are padded to four.

    Each shape is verified once, and another one drafted then.
    """
    of_blocks, zeros = levels in ("by a block", "after each token"), torch.zeros(B, dtype=torch.int64, device=CUDA)
    head = (BlockHead if of_blocks else Head)()
    head._draft_attn_layer_names = {"layer"}
    lookups = head.lookups = None if greedy else Lookups(8, SHAPE, 100, VOCABULARY, CUDA)
    lookup_rows = None if lookups is None else zeros + 1
    if isinstance(head, BlockHead) and levels == "after each token":
        head.with_markov()
    if levels == "all at once":
        head.levels = HeadLevels(MaskRow(7, torch.zeros(1, HIDDEN, device=CUDA)))
    target = torch.zeros(1, VOCABULARY, device=CUDA), torch.zeros(1, 3 * HIDDEN, device=CUDA)
    rows = torch.zeros(100, dtype=torch.int64, device=CUDA)
    ranks = RankAgreement(SimpleNamespace(world_size=1), 4, SHAPE.max_accept_length, CUDA)
    forward = TargetForward(
        target_attention, rows.int(), rows, {"layer": ["a layer", "another"]}, [torch.zeros(1, 4, 64, device=CUDA)]
    )
    linear = LinearStep(SimpleNamespace(names=[], rooms=lambda _: {}), {})  # type: ignore[arg-type]
    groups = [CacheGroup("layer", caches())]
    step = DecodeStep(head, groups, SHAPE, target, linear, 100, {"layer": 0}, ranks, forward)
    # As a graph that runs nothing: what the function of the capture returned.
    capturer: Any = SimpleNamespace(capture=lambda function: (SimpleNamespace(replay=lambda: None), function()))
    step.capture(capturer, captured_shapes(SHAPE), [4], GraphMemory())
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
        if lookups is not None:
            lookups.append(lookup_rows, batch.roots, paths)
        trees = DraftBatch(drafted, root.lengths, table(), params, keys, None, lookup_rows)
        assert step.can_draft(trees, root.state)
        assert root.state.top.logp.dim() == (2 if levels in ("one by one", "after each token") else 3)
        drafts = step.draft_tree(trees, root.tokens, root.state)
        assert drafts.tree.tokens.shape == (B, drafted.width)
        more = 0 if lookups is None else drafted.steps
        assert drafts.scores is not None and drafts.scores.shape[1] == drafted.candidates + more
        assert all_on_cuda(tokens, *accepted, *drafts.tree) and len(tokens) == B
        own = drafts.clone()
        assert step.holds(drafts) and not step.holds(own)
        own_state = HeadState(TopM(*(x.clone() for x in root.state.top)), root.state.hidden.clone())
        step.draft_tree(trees, zeros, own_state)


def test_captured_linear_layers(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify and walk with layers that keep a state, replayed, and each of them alone."""
    layers = [linear_layer(name) for name in ("one", "two", "three")]
    served = LinearLayers.__new__(LinearLayers)
    served._layers, served.names = layers, frozenset(layer.prefix for layer in layers)  # type: ignore[assignment]

    def forward(metadata: dict[str, Any], tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            run_linear_layer(monkeypatch, layer, metadata[layer.prefix], len(tokens))
        return target_attention(metadata, tokens, positions)

    head, rows = Head(), torch.zeros(100, dtype=torch.int64, device=CUDA)
    head._draft_attn_layer_names = {"layer"}
    target = torch.zeros(1, VOCABULARY, device=CUDA), torch.zeros(1, 3 * HIDDEN, device=CUDA)
    ranks = RankAgreement(SimpleNamespace(world_size=1), 4, SHAPE.max_accept_length, CUDA)
    linear = LinearStep(served, {"one": 1, "two": 2, "three": 1})
    of_target = TargetForward(
        forward, rows.int(), rows, {"layer": ["a layer", "another"]}, [torch.zeros(1, 4, 64, device=CUDA)]
    )
    groups = [CacheGroup("layer", caches())]
    step = DecodeStep(head, groups, SHAPE, target, linear, 100, {"layer": 0}, ranks, of_target)
    capturer: Any = SimpleNamespace(capture=lambda function: (SimpleNamespace(replay=lambda: None), function()))
    library.launched.clear()
    step.capture(capturer, [SHAPE], [4], GraphMemory())
    # Verify, and two walks: of greedy requests and others.
    assert library.launched.count("attend_trees (Triton)") == 3
    assert library.launched.count("commit_trees (Triton)") == 6
    batch = read([SHAPE.width - 1] * B, [SHAPE.width] * B)
    slots = torch.zeros(B * SHAPE.width, dtype=torch.int64, device=CUDA)
    logits, params = torch.zeros(len(slots), VOCABULARY, device=CUDA), sampling_params(metadata(True), None, B, 9, CUDA)
    built = {
        name: LinearMetadata(batch.rows(), torch.zeros(B, dtype=torch.int64, device=CUDA)) for name in served.names
    }
    given = {"layer": TreeMetadata(batch.rows(), table(), slots), **built}
    for verified_by_graph in (True, False):
        step.begin(batch, given)
        if verified_by_graph:
            step.verify()
        else:
            for layer in layers:
                run_linear_layer(monkeypatch, layer, built[layer.prefix], len(slots))
        assert all(all_on_cuda(built[name].left[name]) for name in served.names)
        step.walk(batch, logits, params, None)
        assert not any(metadata.left for metadata in built.values())
    step.begin(batch, given)
    step.verify()
    paths = torch.zeros(B, SHAPE.max_accept_length, dtype=torch.int64, device=CUDA)
    served.commit(built, Accepted(paths.int(), paths[:, 0].int() + 1, paths))
