"""The kernels as torch operators, ``torch.ops.eagle_plugin.*``, for torch.compile and graph capture.

Importing this module registers them. Each operator calls the function of the same name in this package, takes the
fields of its NamedTuples as separate tensors, and has a fake implementation, so that a traced graph knows the shapes
without running it. Eager code calls the functions directly: an operator adds a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.tree import CandidateTable, DraftTree, Frontier
from eagle_plugin.kernels import attention, bf16_linear, kv, sampling, tree
from eagle_plugin.kernels.int8_linear import Int8Weight
from eagle_plugin.kernels.sampling import Proposals, SamplingParams

LIBRARY = torch.library.Library("eagle_plugin", "DEF")

_PARAMS = "Tensor temperatures, Tensor top_ks, Tensor top_ps, Tensor min_ps"
_TREE = "Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors, Tensor draws"


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        name = LIBRARY.define(schema)
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"eagle_plugin::{name}", fake, lib=LIBRARY)
        return body

    return register


def _fake_accepted(like: Tensor, b: int, max_accept_length: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        like.new_empty(b, max_accept_length, dtype=torch.int32),
        like.new_empty(b, dtype=torch.int32),
        like.new_empty(b, max_accept_length, dtype=torch.int64),
    )


@_operator(
    "uniforms(Tensor keys, Tensor counters, int stream, SymInt n) -> Tensor",
    lambda keys, counters, stream, n: keys.new_empty(keys.shape[0], n, dtype=torch.float64),
)
def _uniforms(keys: Tensor, counters: Tensor, stream: int, n: int) -> Tensor:
    return sampling.uniforms(keys, counters, stream, n)


@_operator(
    "topk_log_softmax(Tensor logits, int k) -> (Tensor, Tensor)",
    lambda logits, k: (
        logits.new_empty(logits.shape[0], k, dtype=torch.float32),
        logits.new_empty(logits.shape[0], k, dtype=torch.int64),
    ),
)
def _topk_log_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return tree.topk_log_softmax(logits, k)


def _fake_children(logp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, k, slot_weights = logp.shape[0], rest[6], rest[10]
    children = k + len(slot_weights)
    return (
        logp.new_empty(rows, children),
        logp.new_empty(rows, children, dtype=torch.int64),
        logp.new_empty(rows, children, dtype=torch.int32),
        logp.new_empty(logp.shape, dtype=torch.int64),
        logp.new_empty(logp.shape),
    )


@_operator(
    f"propose(Tensor logp, Tensor index, {_PARAMS}, Tensor uniforms, int k, int first_row, int rows_per_request, "
    "Tensor? draft_to_target, float[] slot_weights) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_children,
)
def _propose(
    logp: Tensor,
    index: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    uniforms: Tensor,
    k: int,
    first_row: int,
    rows_per_request: int,
    draft_to_target: Tensor | None,
    slot_weights: Sequence[float],
) -> tuple[Tensor, ...]:
    children = sampling.propose(
        logp,
        index,
        SamplingParams(temperatures, top_ks, top_ps, min_ps),
        uniforms,
        k,
        first_row=first_row,
        rows_per_request=rows_per_request,
        draft_to_target=draft_to_target,
        slot_weights=slot_weights,
    )
    return tuple(children)


def _fake_frontier(*arguments: Any) -> tuple[Tensor, ...]:
    logp, beam = arguments[6], arguments[12]
    b, rows, k = logp.shape
    shape = (b, min(beam, rows * k))
    whole = (torch.int32, torch.float32, torch.int64, torch.int64, torch.int64)
    return tuple(logp.new_empty(shape, dtype=dtype) for dtype in whole)


@_operator(
    "grow_level(Tensor(a!) table_scores, Tensor(b!) table_tokens, Tensor(c!) table_parents, Tensor(d!) table_draws, "
    "int offset, int level, Tensor logp, Tensor tokens, Tensor? draws, Tensor? previous_candidates, "
    "Tensor? previous_scores, Tensor? previous_ancestors, int beam) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_frontier,
)
def _grow_level(
    table_scores: Tensor,
    table_tokens: Tensor,
    table_parents: Tensor,
    table_draws: Tensor,
    offset: int,
    level: int,
    logp: Tensor,
    tokens: Tensor,
    draws: Tensor | None,
    previous_candidates: Tensor | None,
    previous_scores: Tensor | None,
    previous_ancestors: Tensor | None,
    beam: int,
) -> tuple[Tensor, ...]:
    previous = None
    if previous_candidates is not None and previous_scores is not None and previous_ancestors is not None:
        # growing reads neither the tokens nor the rows of the frontier before
        previous = Frontier(
            previous_candidates, previous_scores, previous_ancestors, previous_ancestors, previous_ancestors
        )
    table = CandidateTable(table_scores, table_tokens, table_parents, table_draws)
    return tuple(tree.grow_level(table, offset, level, logp, tokens, previous, beam, draws))


@_operator(
    "grow_levels(Tensor(a!) table_scores, Tensor(b!) table_tokens, Tensor(c!) table_parents, Tensor(d!) table_draws, "
    "int steps, int beam, Tensor logp, Tensor tokens, Tensor? draws) -> ()",
    lambda *arguments: None,
)
def _grow_levels(
    table_scores: Tensor,
    table_tokens: Tensor,
    table_parents: Tensor,
    table_draws: Tensor,
    steps: int,
    beam: int,
    logp: Tensor,
    tokens: Tensor,
    draws: Tensor | None,
) -> None:
    table = CandidateTable(table_scores, table_tokens, table_parents, table_draws)
    tree.grow_levels(table, steps, beam, logp, tokens, draws)


def _fake_tree(scores: Tensor, tokens: Tensor, parents: Tensor, draws: Tensor, roots: Tensor, width: int) -> Any:
    whole = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int32)
    return tuple(roots.new_empty(roots.shape[0], width, dtype=dtype) for dtype in whole)


@_operator(
    "select_tree(Tensor table_scores, Tensor table_tokens, Tensor table_parents, Tensor table_draws, "
    "Tensor root_tokens, int width) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_tree,
)
def _select_tree(
    table_scores: Tensor,
    table_tokens: Tensor,
    table_parents: Tensor,
    table_draws: Tensor,
    root_tokens: Tensor,
    width: int,
) -> tuple[Tensor, ...]:
    table = CandidateTable(table_scores, table_tokens, table_parents, table_draws)
    return tuple(tree.select_tree(table, root_tokens, width))


@_operator(
    f"verify_tree({_TREE}, Tensor logits, {_PARAMS}, Tensor q_tokens, Tensor q_weights, Tensor uniforms, "
    "int max_accept_length) -> (Tensor, Tensor, Tensor)",
    lambda *arguments: _fake_accepted(arguments[5], arguments[0].shape[0], arguments[13]),
)
def _verify_tree(*arguments: Any) -> tuple[Tensor, ...]:
    draft, logits, uniforms, max_accept_length = DraftTree(*arguments[:5]), arguments[5], arguments[12], arguments[13]
    params, proposals = SamplingParams(*arguments[6:10]), Proposals(*arguments[10:12])
    return tuple(sampling.verify_tree(draft, logits, params, proposals, uniforms, max_accept_length))  # type: ignore[arg-type]


@_operator(
    "int8_linear(Tensor x, Tensor values, Tensor scales) -> Tensor",
    lambda x, values, scales: x.new_empty(*x.shape[:-1], scales.shape[0]),
)
def _int8_linear(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return Int8Weight(values, scales).linear(x)


@_operator(
    "bf16_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
def _bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return bf16_linear.linear(x, weight, bias)


@_operator(
    "store_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor loc, Tensor k, Tensor v) -> ()",
    lambda k_cache, v_cache, loc, k, v: None,
)
def _store_kv(k_cache: Tensor, v_cache: Tensor, loc: Tensor, k: Tensor, v: Tensor) -> None:
    kv.store_kv(k_cache, v_cache, loc, k, v)


@_operator(
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor slot_table, Tensor rows, Tensor prefix_lens, "
    "Tensor ancestors, int tail, float scale, float logit_cap, int window, Tensor? sinks, "
    "int chunk=0) -> Tensor",
    lambda q, k_cache, v_cache, *rest: q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2]),
)
def _tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    ancestors: Tensor,
    tail: int,
    scale: float,
    logit_cap: float,
    window: int,
    sinks: Tensor | None,
    chunk: int = 0,
) -> Tensor:
    return attention.tree_attention(
        q,
        k_cache,
        v_cache,
        slot_table,
        rows,
        prefix_lens,
        ancestors,
        tail=tail,
        scale=scale,
        logit_cap=logit_cap,
        window=window,
        chunk=chunk,
        sinks=sinks,
    )
