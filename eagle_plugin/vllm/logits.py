"""The target's logits after every node of the verified trees, with what the requests ask for applied.

The functions of vLLM's sampler take one row per request. Here a row is a node; its history is its request's output and
the drafted tokens on the path to it. The functions are called unchanged, with an index of requests by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import _convert_to_tensors

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.runtime.host_to_device import values_to_device
from eagle_plugin.vllm.thinking import force_ends, forces_ends


class NodeRows(NamedTuple):
    """Which node each row of the logits belongs to."""

    requests: Tensor  # [n] int64
    nodes: Tensor  # [n] int64


class MinimalLength(NamedTuple):
    """A request that must not end before its text has some length.

    vLLM's own count cannot be used: when it schedules ahead, the count includes drafts that are not verified yet.
    """

    request: int
    tokens: int  # of prompt and text
    stops: list[int]
    structured: bool


def minimal_lengths(states: list[Any]) -> list[MinimalLength]:
    """The minimal lengths in a batch of vLLM's ``CachedRequestState``."""
    asked = [(i, state.sampling_params, state.num_prompt_tokens) for i, state in enumerate(states)]
    return [
        MinimalLength(i, prompt + params.min_tokens, sorted(stops), params.structured_outputs is not None)
        for i, params, prompt in asked
        if params.min_tokens and (stops := params.all_stop_token_ids)
    ]


def node_rows(b: int, width: int, logits_rows: Tensor | None, n: int, device: torch.device) -> NodeRows:
    """The n rows of logits as vLLM orders them: request by request, one row for each scheduled node.

    logits_rows [b, W] int64 is the row of each node, ascending; padding has that of the last node. None: in order.
    """
    if logits_rows is None:
        rows = torch.arange(b * width, device=device)
        return NodeRows(rows // width, rows % width)
    sizes = logits_rows[:, -1] - logits_rows[:, 0] + 1
    requests = torch.arange(b, device=device).repeat_interleave(sizes, output_size=n)
    return NodeRows(requests, torch.arange(n, device=device) - logits_rows[requests, 0])


def drafted_before(tree: DraftTree, rows: NodeRows) -> tuple[Tensor, Tensor]:
    """The drafted tokens of each row's tree [n, W - 1], and which of them are on the path to its node, bool."""
    places = torch.arange(1, tree.tokens.shape[1], device=tree.tokens.device)
    above = (tree.ancestors[rows.requests, rows.nodes][:, None] >> places) & 1 == 1
    return tree.tokens[rows.requests, 1:], above


def transform_logits(
    metadata: Any, tree: DraftTree, roots: Tensor, minimal: list[MinimalLength], rows: NodeRows, logits: Tensor
) -> Tensor:
    """Apply everything but temperature and filters, in vLLM's order, at every node; logits [n, V] float32, in place.

    metadata is a vLLM ``SamplingMetadata`` of b requests, tree their trees [b, W], roots [b] int64 the positions
    of the roots.
    """
    if metadata.allowed_token_ids_mask is not None:
        logits.masked_fill_(metadata.allowed_token_ids_mask[rows.requests], -torch.inf)
    penalised = not metadata.no_penalties
    if bad_words := metadata.bad_words_token_ids:  # a walk of the host in vLLM too
        requests, histories = rows.requests.tolist(), _histories(metadata.output_token_ids, tree, rows)
        apply_bad_words(logits, {r: bad_words[i] for r, i in enumerate(requests) if i in bad_words}, histories)
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            _forbid_stops(minimal, tree, roots, rows, logits)
        elif isinstance(processor, LogitBiasLogitsProcessor):
            _add_biases(processor, rows, logits)
        else:  # vLLM refuses custom processors beside drafts
            raise TypeError(f"eagle-plugin does not know the logits processor {type(processor).__name__}")
    if penalised:
        logits = _penalise(metadata, tree, rows, logits)
    force_ends(metadata, rows.nodes, logits)
    return logits


def min_ps(metadata: Any, b: int) -> Tensor | None:
    """The requests' min_p [b] float32; None when none has any."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            return processor.min_p.view(-1)[:b]
    return None


def keeps_logits(metadata: Any) -> bool:
    """Whether no request changes its logits before temperature and filters, minimal lengths not counted."""
    processors = metadata.logitsprocs.non_argmax_invariant
    return (
        metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and metadata.no_penalties
        and not any(getattr(p, "biases", None) for p in processors)
        and not forces_ends(metadata)
    )


def _penalise(metadata: Any, tree: DraftTree, rows: NodeRows, logits: Tensor) -> Tensor:
    """Apply the penalties for the text before each row: the request's output, then the path from the root."""
    nothing = logits.shape[1]  # what vLLM pads lists of tokens with
    outputs = _convert_to_tensors(metadata.output_token_ids, nothing, logits.device)
    outputs = outputs.masked_fill(outputs < 0, nothing)[rows.requests]
    tokens, above = drafted_before(tree, rows)
    path = torch.where(above, tokens, nothing)
    return apply_penalties(
        logits,
        metadata.prompt_token_ids[rows.requests],
        torch.cat([outputs, path], 1),
        metadata.presence_penalties[rows.requests],
        metadata.frequency_penalties[rows.requests],
        metadata.repetition_penalties[rows.requests],
    )


def _histories(outputs: list[list[int]], tree: DraftTree, rows: NodeRows) -> list[list[int]]:
    """The generated tokens before each row: the request's output, then the path from the root."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    histories = []
    for i, node in zip(rows.requests.tolist(), rows.nodes.tolist(), strict=True):
        path: list[int] = []
        while node > 0:
            path.append(tokens[i][node])
            node = parents[i][node]
        histories.append([*outputs[i], *reversed(path)] if path else outputs[i])
    return histories


def _forbid_stops(minimal: list[MinimalLength], tree: DraftTree, roots: Tensor, rows: NodeRows, logits: Tensor) -> None:
    """Forbid the end before a request's minimal length; the path to a node counts as text."""
    lengths = roots[rows.requests] + tree.depths[rows.requests, rows.nodes] + 1
    for i, tokens, stops, structured in minimal:
        forbidden = ((rows.requests == i) & (lengths < tokens))[:, None]
        columns = values_to_device(stops, torch.int64, logits.device)
        before = logits[:, columns]
        logits[:, columns] = before.masked_fill(forbidden, -torch.inf)
        if structured:  # where a grammar allows nothing but the end, the end stays allowed
            stuck = logits.isneginf().all(dim=1, keepdim=True) & forbidden
            logits[:, columns] = torch.where(stuck, before, logits[:, columns])


def _add_biases(processor: Any, rows: NodeRows, logits: Tensor) -> None:
    for i, biases in processor.biases.items():
        columns = values_to_device(list(biases), torch.int64, logits.device)
        values = values_to_device(list(biases.values()), torch.float32, logits.device)
        logits[:, columns] += values.where((rows.requests == i)[:, None], 0.0)
