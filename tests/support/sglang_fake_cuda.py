"""Batches, drafters and a verifier of SGLang on fake CUDA tensors; the forwards of the models compute nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from fake_cuda import CUDA, require_cuda
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.runtime.graphs import Graph
from eagle_plugin.runtime.parallel_levels import Block, HeadLevels, MaskRow
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.sglang.batch import BatchReader, RoundBatch
from eagle_plugin.sglang.block_drafter import BlockDrafter
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter, TreeExtendInput, no_tokens
from eagle_plugin.sglang.verifier import TreeVerifier

B, VOCABULARY, DRAFT_VOCABULARY, HIDDEN, TOP_M = 3, 512, 256, 64, 128
SHAPE = Shape(3, 4, 16)
BLOCK = 8


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
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
    )
    parameters = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    parameters |= changes.pop("parameters", {})
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(sampling_seed=None, stop_token_ids=[7], **parameters),
        output_ids=[5, 6],
        origin_input_ids=[1, 2, 3],
        eos_token_ids={2},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2),
    )
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


def reader() -> BatchReader:
    return BatchReader(SHAPE.reach, 8, torch.zeros(8, 64, dtype=torch.int32, device=CUDA), KeyTable(8, CUDA, seed=1))


def check_rows(tokens: Any, positions: Any, slots: Any, info: Any) -> None:
    rows = info.tree_rows
    given = {"tokens": tokens, "positions": positions, "slots": slots, "table": info.slot_table, **rows._asdict()}
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor):
            require_cuda(name, tensor)


class Drafter(TreeDrafter):
    """The drafter, with a head whose forward checks what it is given and computes nothing."""

    def __init__(self) -> None:
        self.topk, self._most_children, self.hot_token_id = TOP_M, SHAPE.topk, None
        self._chain, self._nothing = chain_ancestors(MAX_WIDTH, CUDA), no_tokens(TOP_M, CUDA)
        self._contexts = contextlib.nullcontext

    def _forward(self, batch: RoundBatch, *, tokens: Any, positions: Any, slots: Any, info: Any, **_: Any) -> Any:
        check_rows(tokens, positions, slots, info)
        require_cuda("hidden", info.hidden_states)
        n = batch.padded_b if isinstance(info, TreeExtendInput) else len(tokens)
        return SimpleNamespace(
            next_token_logits=torch.zeros(n, DRAFT_VOCABULARY, device=CUDA),
            hidden_states=torch.zeros(n, HIDDEN, device=CUDA),
        )


class ParallelDrafter(Drafter):
    """The same with a head that drafts all levels in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = HeadLevels(MaskRow(7, torch.zeros(1, HIDDEN, device=CUDA)))


class Blocks(BlockDrafter):
    """A block drafter whose one layer checks what it is given and computes nothing."""

    def __init__(self) -> None:
        cache = torch.zeros(100, 2, 64, device=CUDA)
        layer = SimpleNamespace(
            attn=SimpleNamespace(layer_id=0, k_scale=None, v_scale=None),
            num_kv_heads=2,
            head_dim=64,
            kv_proj_only=lambda context: (context.repeat(1, 2), context.repeat(1, 2)),
            apply_k_norm=lambda k: k,
            apply_k_rope=lambda positions, k: k + positions[:, None],
        )
        model = SimpleNamespace(
            layers=[SimpleNamespace(self_attn=layer)],
            project_target_hidden=lambda features: features[:, :HIDDEN],
            prepare_context_hidden_for_kv=lambda layer, context: context,
        )
        pool = SimpleNamespace(get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache)
        self.draft_runner = SimpleNamespace(model=model, token_to_kv_pool=pool)
        self.levels = HeadLevels(block=Block(7, BLOCK), in_draft=True)
        self._embedding, self._embedding_scale = (lambda tokens: torch.zeros(len(tokens), HIDDEN, device=CUDA)), 1.0
        self._contexts = contextlib.nullcontext

    def with_markov(self) -> Blocks:
        """The same with a Markov head, sampling from its anchor."""
        bias, self._vocabulary = torch.zeros(VOCABULARY, VOCABULARY, device=CUDA), VOCABULARY
        head = SimpleNamespace(step_bias=lambda tokens, hidden_states, state: (bias[tokens], state))
        self.draft_runner.model.markov_head = head
        block = Block(7, BLOCK, first=0)
        self.levels = HeadLevels(block=block, in_draft=True, after=self._logits_after)
        return self

    def _forward(self, batch: RoundBatch, *, tokens: Any, positions: Any, slots: Any, info: Any, **others: Any) -> Any:
        check_rows(tokens, positions, slots, info)
        require_cuda("embeddings", others["embeddings"])
        assert len(tokens) == len(slots) == batch.padded_b * BLOCK
        return SimpleNamespace(hidden_states=torch.zeros(len(tokens), HIDDEN, device=CUDA))

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(states), VOCABULARY, device=CUDA)


class Verifier(TreeVerifier):
    """The verifier, with a target whose forward checks what it is given and computes nothing."""

    def __init__(self) -> None:
        pool = SimpleNamespace(
            data_ptrs=torch.zeros(4, dtype=torch.int64, device=CUDA),
            data_strides=torch.zeros(4, dtype=torch.int64, device=CUDA),
            size=100,
            page_size=1,
        )
        config = SimpleNamespace(vocab_size=VOCABULARY, model_is_mrope=False)
        runner = SimpleNamespace(model_config=config, device=CUDA, model=torch.nn.Module())
        worker = SimpleNamespace(model_runner=runner)
        super().__init__(worker, None, 8, SimpleNamespace(get_kvcache=lambda: pool))
        self._forward = self._target

    def _target(self, batch: RoundBatch, *, tokens: Any, positions: Any, slots: Any, info: Any, **_: Any) -> Any:
        check_rows(tokens, positions, slots, info)
        return LogitsProcessorOutput(
            next_token_logits=torch.zeros(len(tokens), VOCABULARY, device=CUDA),
            hidden_states=torch.zeros(len(tokens), 3 * HIDDEN, device=CUDA),
        )


class Capturer:
    """Calls the functions, as a capture does; a replay computes nothing."""

    def capture(self, function: Any) -> tuple[Graph, Any]:
        return SimpleNamespace(replay=lambda: None), function()


def state() -> DraftState:
    top = TopM(torch.zeros(B, TOP_M, device=CUDA), torch.zeros(B, TOP_M, dtype=torch.int64, device=CUDA))
    return DraftState(
        HeadState(top, torch.zeros(B, HIDDEN, device=CUDA)), torch.zeros(B, dtype=torch.int64, device=CUDA)
    )
