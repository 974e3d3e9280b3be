"""SGLang's decode round on fake CUDA tensors, with forwards of the two models that compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang_fake_cuda import (
    BLOCK,
    SHAPE,
    VOCABULARY,
    B,
    Blocks,
    Capturer,
    Drafter,
    ParallelDrafter,
    Verifier,
    reader,
    schedule_batch,
    state,
)

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.block_drafter import empty_state
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState, TreeDraftInput
from eagle_plugin.sglang.sampling import draw_tokens, sampling_params
from eagle_plugin.sglang.verifier import log_probabilities


@pytest.fixture
def decode_round(library: FakeLibrary) -> DecodeRound:
    return DecodeRound(Drafter(), Verifier(), reader())


@pytest.fixture(params=[Drafter, ParallelDrafter], ids=["levels one by one", "all levels at once"])
def any_round(request: pytest.FixtureRequest, library: FakeLibrary) -> DecodeRound:
    return DecodeRound(request.param(), Verifier(), reader())


def test_a_batch_is_read_in_one_launch(library: FakeLibrary) -> None:
    batch = reader().read(SHAPE, schedule_batch(), 4)
    assert all_on_cuda(*batch, batch.window(0, 4), *batch.tree_rows(batch.start.slots, 4))
    assert library.launched == ["start_round"]


def test_rotary_positions_of_three_axes(library: FakeLibrary) -> None:
    """The host knows what pictures take, and waits for nothing."""
    table, keys = torch.zeros(8, 64, dtype=torch.int32, device=CUDA), KeyTable(8, CUDA, seed=1)
    with_axes = BatchReader(SHAPE.reach, 8, table, keys, has_axes=True)
    inputs = [None, SimpleNamespace(mrope_position_delta=torch.tensor([[-7]]))]
    batch = with_axes.read(SHAPE, schedule_batch(multimodal_inputs=inputs[:B]), 4)
    positions = torch.zeros(4 * 16, dtype=torch.int64, device=CUDA)
    assert all_on_cuda(batch.shifts, batch.rotary_axes(positions))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("shape", [SHAPE, PLAIN], ids=str)
def test_a_round(library: FakeLibrary, any_round: DecodeRound, shape: Shape, greedy: bool, captured: bool) -> None:
    decode_round = any_round
    if captured:
        decode_round.capture(Capturer(), SHAPE, [PLAIN, SHAPE], [2, 4], GraphMemory())
    schedule = schedule_batch()
    schedule.sampling_info.is_all_greedy = greedy
    padded_b = decode_round.padded_b(B, shape)
    assert padded_b == (4 if captured else B)
    library.launched.clear()
    batch = decode_round._reader.read(shape, schedule, padded_b)
    drafts = decode_round.draft(batch, state())
    output = decode_round.verify(batch, drafts)
    accepted = decode_round.walk(batch, drafts, output)
    after = decode_round.extend(batch, accepted, output, state())
    assert all_on_cuda(*drafts.first(B).tree, *output, *accepted, after)
    assert len(after.roots) == padded_b
    if captured:
        assert library.launched == ["start_round"], "a captured function was called instead of replayed"
    else:
        wanted = ["verify_tree", "compact_kv", "read_path", "topk_log_softmax"]
        assert library.launched[-len(wanted) :] == wanted
        assert (greedy or shape == PLAIN) == ("propose" not in library.launched)


@pytest.mark.parametrize("markov", [False, True], ids=["", "Markov head"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 1, 2), PLAIN], ids=str)
def test_a_round_of_a_block_drafter(library: FakeLibrary, shape: Shape, captured: bool, markov: bool) -> None:
    """Whose block may be longer than the tree is wide."""
    drafter = Blocks().with_markov() if markov else Blocks()
    table, keys = torch.zeros(8, 64, dtype=torch.int32, device=CUDA), KeyTable(8, CUDA, seed=1)
    decode_round = DecodeRound(drafter, Verifier(), BatchReader(SHAPE.reach, 8, table, keys, least=BLOCK))
    if captured:
        decode_round.capture(Capturer(), SHAPE, [PLAIN, Shape(1, 1, 2), SHAPE], [2, 4], GraphMemory())
    library.launched.clear()
    begun = DraftState(empty_state(B, torch.device(CUDA)), torch.zeros(B, dtype=torch.int64, device=CUDA))
    batch = decode_round._reader.read(shape, schedule_batch(), decode_round.padded_b(B, shape))
    drafts = decode_round.draft(batch, begun)
    output = decode_round.verify(batch, drafts)
    accepted = decode_round.walk(batch, drafts, output)
    after = decode_round.extend(batch, accepted, output, begun)
    assert all_on_cuda(*drafts.first(B).tree, *output, *accepted, after.roots)
    if captured:
        assert library.launched == ["start_round"], "a captured function was called instead of replayed"
    else:
        assert library.launched[-4:] == ["verify_tree", "compact_kv", "read_path", "store_kv"]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_branches_are_looked_up(library: FakeLibrary, any_round: DecodeRound, captured: bool) -> None:
    """The host gives the tokens of a prompt, and never hears of those that a round accepts."""
    decode_round, shapes = any_round, captured_shapes(SHAPE)
    lookups = decode_round._drafter.lookups = Lookups(8, SHAPE, 64, VOCABULARY, CUDA)
    if captured:
        decode_round.capture(Capturer(), SHAPE, shapes, [2, 4], GraphMemory(), with_sums=True)
    schedule = schedule_batch()
    library.launched.clear()
    rows = schedule.req_pool_indices
    lookups.begin(rows, [[1, 2, 3, 1, 2]] * B)
    lookups.append_first(rows, schedule.seq_lens, torch.zeros(B, dtype=torch.int32, device=CUDA))
    batch = decode_round._reader.read(SHAPE, schedule, decode_round.padded_b(B, SHAPE))
    assert library.launched == ["append_tokens", "start_round"]
    library.launched.clear()
    drafts = decode_round.draft(batch, state())
    assert drafts.scores is not None and drafts.scores.shape[1] == SHAPE.candidates + SHAPE.steps
    output = decode_round.verify(batch, drafts)
    decode_round.extend(batch, decode_round.walk(batch, drafts, output), output, state())
    assert all_on_cuda(*drafts.first(B).tree, *lookups.history)
    if captured:
        assert not library.launched, "a captured function was called instead of replayed"
        sums = decode_round._path_sums[SHAPE]
        assert decode_round.path_sums(batch, sums, drafts.scores).shape == (len(sums.shapes), 4, SHAPE.steps)
    else:
        assert [name for name in library.launched if name in ("look_up", "select_tree", "append_tokens")] == [
            "look_up",
            "select_tree",
            "append_tokens",
        ]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_path_sums(library: FakeLibrary, any_round: DecodeRound, greedy: bool) -> None:
    """What is captured of them stays on the device; their constants are there before the first request."""
    shapes = captured_shapes(SHAPE)
    any_round.capture(Capturer(), SHAPE, shapes, [2, 4], GraphMemory(), with_sums=True)
    schedule = schedule_batch()
    schedule.sampling_info.is_all_greedy = greedy
    batch = any_round._reader.read(SHAPE, schedule, any_round.padded_b(B, SHAPE))
    drafts = any_round.draft(batch, state()).first(B)
    assert drafts.scores is not None
    sums = any_round._path_sums[SHAPE]
    replays = any_round.functions.replays
    found = any_round.path_sums(batch, sums, drafts.scores)
    assert all_on_cuda(found, sums(drafts.scores)) and found.shape == (len(sums.shapes), 4, SHAPE.steps)
    assert any_round.functions.replays == replays + 1


def test_the_ranks_agree(library: FakeLibrary) -> None:
    """Two ranks, whose broadcast takes one int32 tensor on the device."""

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert tensor.dtype is torch.int32 and src == 0
        library.get_function("broadcast")(tensor)

    longest = SHAPE.max_accept_length
    tokens = torch.zeros(B, longest, dtype=torch.int64, device=CUDA)
    given = Accepted(tokens.int(), tokens[:, 0].int(), tokens)
    group = SimpleNamespace(world_size=2, broadcast=broadcast)
    agreed = RankAgreement(group, B, longest, CUDA).agree(given)
    assert all_on_cuda(agreed) and library.launched == ["broadcast"]
    for ours, theirs in zip(agreed, given, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and ours.is_contiguous()


@pytest.mark.parametrize(
    "parameters", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"min_new_tokens": 9}], ids=str
)
def test_penalties(library: FakeLibrary, decode_round: DecodeRound, parameters: dict[str, Any]) -> None:
    """The counts stay on the device: a round adds its own tokens, and never reads what the host knows of them."""
    schedule, verifier = schedule_batch(parameters=parameters), decode_round._verifier
    verifier.penalties.start(schedule)
    verifier.penalties.count_prefill(schedule, torch.zeros(B, dtype=torch.int32, device=CUDA))
    assert library.launched == ["count_tokens", "count_tokens"]  # the output of resumed requests, the new token
    library.launched.clear()
    batch = decode_round._reader.read(SHAPE, schedule, B)
    drafts = decode_round.draft(batch, state())
    logits = decode_round.verify(batch, drafts).logits
    library.launched.clear()
    for request in schedule.reqs:
        request.output_ids = []  # the host knows nothing of it
    # As the engine does for the forward of a batch with penalties.
    schedule.sampling_info.acc_additive_penalties = torch.zeros(B, VOCABULARY, device=CUDA)
    accepted = verifier.walk_with_transforms(batch, schedule, drafts, logits, None, None)
    verifier.penalties.count(batch, accepted)
    assert all_on_cuda(*accepted)
    assert library.launched == ["penalize_nodes", "verify_tree", "count_tokens"]


def test_log_probabilities_and_bias(library: FakeLibrary, decode_round: DecodeRound) -> None:
    schedule = schedule_batch(return_logprob=True, logit_bias=torch.zeros(B, VOCABULARY, device=CUDA))
    batch = decode_round._reader.read(SHAPE, schedule, B)
    drafts = decode_round.draft(batch, state())
    logits = decode_round.verify(batch, drafts).logits
    accepted = decode_round._verifier.walk_with_transforms(batch, schedule, drafts, logits, None, None)
    output = log_probabilities(schedule, logits, accepted, SHAPE.width)
    assert all_on_cuda(output.next_token_logprobs)


def test_the_token_after_a_seeded_prefill(library: FakeLibrary) -> None:
    params, keys = sampling_params(schedule_batch().sampling_info), torch.zeros(B, dtype=torch.int64, device=CUDA)
    assert all_on_cuda(draw_tokens(torch.zeros(B, VOCABULARY, device=CUDA), params, keys, keys))


@pytest.mark.parametrize("scale", [None, 0.5, "of a checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_attention(library: FakeLibrary, dtype: torch.dtype, scale: Any) -> None:
    """A cache of 8-bit floats has another kernel to write it, and scales, which the kernels read."""
    cache, float8 = torch.zeros(100, 2, 64, device=CUDA).to(dtype), dtype != torch.float32
    scale = torch.zeros((), device=CUDA) if isinstance(scale, str) else scale
    base = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache),
        forward=lambda *_: "the engine's",
    )
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=4, qk_head_dim=64, v_head_dim=64, scaling=0.1, logit_cap=0.0, sliding_window_size=-1,
        use_irope=False, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    batch = reader().read(SHAPE, schedule_batch(), B)
    rows = batch.tree_rows(torch.zeros(B, 16, dtype=torch.int64, device=CUDA), 16)
    n = B * 16
    info = TreeDraftInput(tree_rows=rows, slot_table=batch.start.table)
    forward_batch = SimpleNamespace(spec_info=info, out_cache_loc=batch.window(0, 16).view(-1))
    q, k = torch.zeros(n, 4 * 64, device=CUDA), torch.zeros(n, 2, 64, device=CUDA)
    attention = TreeAttention(base)
    library.launched.clear()
    assert all_on_cuda(attention.forward(q, k, k, layer, forward_batch))
    assert library.launched == ["store_kv (Triton)" if float8 else "store_kv", "tree_attention (Triton)"]
    # The batch says what it is: one without trees is the engine's, whatever came before.
    assert attention.forward(q, k, k, layer, SimpleNamespace(spec_info=None)) == "the engine's"
