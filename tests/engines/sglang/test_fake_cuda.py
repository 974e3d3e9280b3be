"""SGLang's decode round on fake CUDA tensors, with forwards of the two models that compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, require_cuda

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang.srt.speculative.eagle_info import EagleDraftInput

from eagle_plugin.core.shape import MAX_WIDTH, PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.rng import KeyTable
from eagle_plugin.engines.round import Drafts, TreeRows
from eagle_plugin.engines.sglang import verifier
from eagle_plugin.engines.sglang.attention import TreeAttention
from eagle_plugin.engines.sglang.batch import RoundBatch
from eagle_plugin.engines.sglang.drafter import TreeDrafter, TreeDraftInput, TreeExtendInput, chain_ancestors
from eagle_plugin.engines.sglang.ranks import RankAgreement
from eagle_plugin.engines.sglang.sampling import draw_tokens, sampling_params
from eagle_plugin.kernels.sampling import Proposals

B, VOCABULARY, DRAFT_VOCABULARY, HIDDEN, TOP_M = 3, 512, 256, 64, 128
SHAPE = Shape(3, 4, 16)


def schedule_batch(**changes: Any) -> SimpleNamespace:
    """What our code reads of an SGLang ``ScheduleBatch`` of sampled requests."""
    column = torch.ones(B, device=CUDA)
    info = SimpleNamespace(
        temperatures=column[:, None],
        top_ks=column.int(),
        top_ps=column,
        min_ps=column - 1,
        is_all_greedy=False,
        logit_bias=changes.pop("logit_bias", None),
        has_custom_logit_processor=False,
    )
    parameters = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    request = SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=None, **parameters), output_ids=[5, 6])
    values = {
        "has_grammar": False,
        "return_logprob": False,
        "top_logprobs_nums": [0] * B,
        "token_ids_logprobs": [None] * B,
    }
    return SimpleNamespace(
        seq_lens=torch.full((B,), 9, device=CUDA),
        req_pool_indices=torch.arange(B, device=CUDA),
        sampling_info=info,
        reqs=[request] * B,
        **(values | changes),
    )


def round_batch(shape: Shape = SHAPE, batch: Any = None) -> RoundBatch:
    table = torch.zeros(8, 64, dtype=torch.int32, device=CUDA)
    return RoundBatch.read(shape, batch or schedule_batch(), table, KeyTable(8, CUDA, seed=1))


class Drafter(TreeDrafter):
    """The drafter, with a head whose forward checks what it is given and computes nothing."""

    def __init__(self) -> None:
        self.topk, self._most_children, self.hot_token_id = TOP_M, SHAPE.topk, None
        self._chain = chain_ancestors(MAX_WIDTH, CUDA)

    def _forward(self, batch: RoundBatch, *, tokens: Any, positions: Any, slots: Any, info: Any, **_: Any) -> Any:
        rows: TreeRows = info.tree_rows
        given = {"tokens": tokens, "positions": positions, "slots": slots, "hidden": info.hidden_states}
        for name, tensor in (given | rows._asdict()).items():
            if isinstance(tensor, torch.Tensor):
                require_cuda(name, tensor)
        n = B if isinstance(info, TreeExtendInput) else len(tokens)
        return SimpleNamespace(
            next_token_logits=torch.zeros(n, DRAFT_VOCABULARY, device=CUDA),
            hidden_states=torch.zeros(n, HIDDEN, device=CUDA),
        )


def accepted() -> Accepted:
    longest = SHAPE.max_accept_length
    lengths = torch.ones(B, dtype=torch.int32, device=CUDA)
    return Accepted(
        lengths[:, None].expand(B, longest).contiguous(),
        lengths,
        torch.zeros(B, longest, dtype=torch.int64, device=CUDA),
    )


def state() -> EagleDraftInput:
    return EagleDraftInput(
        topk_p=torch.zeros(B, TOP_M, device=CUDA),
        topk_index=torch.zeros(B, TOP_M, dtype=torch.int64, device=CUDA),
        hidden_states=torch.zeros(B, HIDDEN, device=CUDA),
        bonus_tokens=torch.zeros(B, dtype=torch.int32, device=CUDA),
    )


def all_on_cuda(*values: Any) -> bool:
    tensors = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return all(x.device.type == "cuda" for x in tensors if isinstance(x, torch.Tensor))


def test_a_round_is_read(library: FakeLibrary) -> None:
    batch = round_batch()
    assert all_on_cuda(*batch, batch.window(0, 4), *batch.tree_rows(batch.slots, 4))


def test_draft_tree(library: FakeLibrary) -> None:
    drafts = Drafter().draft_tree(round_batch(), state())
    assert all_on_cuda(drafts.tree, drafts.proposals)


def test_extend(library: FakeLibrary) -> None:
    hidden = torch.zeros(B * SHAPE.max_accept_length, 3 * HIDDEN, device=CUDA)
    after = Drafter().extend(round_batch(), accepted(), hidden)
    assert all_on_cuda(after.topk_p, after.topk_index, after.hidden_states, after.bonus_tokens)


def agreement(library: FakeLibrary) -> RankAgreement:
    """Two ranks, whose broadcast takes one int32 tensor on the device."""

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert tensor.dtype is torch.int32 and src == 0
        library.get_function("broadcast")(tensor)

    group = SimpleNamespace(world_size=2, broadcast=broadcast)
    return RankAgreement(group, B, SHAPE.max_accept_length, CUDA)


def test_the_ranks_agree(library: FakeLibrary) -> None:
    given = accepted()
    agreed = agreement(library).agree(given)
    assert all_on_cuda(agreed) and library.launched == ["broadcast"]
    for ours, theirs in zip(agreed, given, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and ours.is_contiguous()


@pytest.mark.parametrize("changes", [{}, {"return_logprob": True}, {"logit_bias": True}], ids=["", "logprobs", "bias"])
@pytest.mark.parametrize("shape", [SHAPE, PLAIN], ids=str)
def test_verify(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, shape: Shape, changes: dict[str, Any]) -> None:
    if "logit_bias" in changes:
        changes = {"logit_bias": torch.zeros(B, VOCABULARY, device=CUDA)}
    width = shape.width
    logits = torch.zeros(B * width, VOCABULARY, device=CUDA)
    output = SimpleNamespace(next_token_logits=logits, hidden_states=torch.zeros(B * width, 3 * HIDDEN, device=CUDA))
    forward = SimpleNamespace(logits_output=output, routed_experts_output=None, indexer_topk_output=None)
    worker = SimpleNamespace(forward_batch_generation=lambda **_: forward)
    pool = SimpleNamespace(
        data_ptrs=torch.zeros(4, dtype=torch.int64, device=CUDA),
        data_strides=torch.zeros(4, dtype=torch.int64, device=CUDA),
        size=100,
        page_size=1,
    )
    monkeypatch.setattr(verifier, "eagle_prepare_for_verify", lambda *_: (None, False))
    ours = verifier.TreeVerifier(worker, None, SimpleNamespace(get_kvcache=lambda: pool), agreement(library))
    batch = schedule_batch(**changes)
    drafts = Drafts(
        DraftTree.padding(torch.zeros(B, dtype=torch.int64, device=CUDA), width), Proposals.none(B, CUDA), shape
    )
    result, path = ours.verify(round_batch(shape, batch), batch, drafts, None)
    assert all_on_cuda(path, result.next_token_ids, result.new_seq_lens, output.hidden_states)
    assert library.launched == ["uniforms", "verify_tree", "broadcast", "compact_kv"]


def test_the_token_after_a_seeded_prefill(library: FakeLibrary) -> None:
    u = torch.zeros(B, 1, dtype=torch.float64, device=CUDA)
    assert all_on_cuda(
        draw_tokens(torch.zeros(B, VOCABULARY, device=CUDA), sampling_params(schedule_batch().sampling_info), u)
    )


def test_attention(library: FakeLibrary) -> None:
    cache = torch.zeros(100, 2, 64, device=CUDA)
    base = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 64, dtype=torch.int32, device=CUDA)),
        forward=lambda *_: "the engine's",
    )
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=4, qk_head_dim=64, v_head_dim=64, scaling=0.1, logit_cap=0.0, sliding_window_size=-1
    )
    batch = round_batch()
    rows = batch.tree_rows(torch.zeros(B, 16, dtype=torch.int64, device=CUDA), 16)
    n = B * 16
    forward_batch = SimpleNamespace(
        spec_info=TreeDraftInput(tree_rows=rows), out_cache_loc=batch.window(0, 16).view(-1)
    )
    q, k = torch.zeros(n, 4 * 64, device=CUDA), torch.zeros(n, 2, 64, device=CUDA)
    attention = TreeAttention(base)
    assert all_on_cuda(attention.forward(q, k, k, layer, forward_batch))
    assert library.launched == ["store_kv", "tree_attention (Triton)"]
    # The batch says what it is: one without trees is the engine's, whatever came before.
    assert attention.forward(q, k, k, layer, SimpleNamespace(spec_info=None)) == "the engine's"
