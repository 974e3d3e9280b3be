"""How the requests of a batch of vLLM's V2 model runner sample: their parameters, random numbers and processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, apply_penalties

from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.logits import NodeRows, drafted_before

GREEDY = 0.0  # vLLM rounds temperatures below its limit to this one


def draws_of(sampler: Any, batch: Any) -> tuple[SamplingParams, Tensor | None]:
    """The parameters of the requests of a vLLM ``InputBatch`` and keys [b] int64; None where all are greedy.

    sampler is vLLM's ``Sampler``, which holds what requests ask for by their slot. Its seeds are the keys that
    `rng.key_of_seed` makes of them: int64.
    """
    states, slots, on_host = sampler.sampling_states, batch.idx_mapping, batch.idx_mapping_np
    temperatures = states.temperature.gpu[slots]
    greedy = temperatures == GREEDY
    params = SamplingParams(
        temperatures.masked_fill(greedy, 1.0),
        states.top_k.gpu[slots].masked_fill(greedy, 1),
        states.top_p.gpu[slots],
        states.min_p.gpu[slots],
    )
    if (states.temperature.np[on_host] == GREEDY).all():
        return params, None
    return params, states.seeds.gpu[slots]


def token_by_token(sampler: Any, batch: Any) -> list[int]:
    """The requests whose logits depend on the tokens before a node in a way that vLLM computes along chains only.

    Of these the root of a tree is verified, where a chain and a tree are the same.
    """
    on_host, thoughts = batch.idx_mapping_np, sampler.thinking_budget_state
    found = thoughts.use_thinking_budget[on_host].copy() if thoughts.enabled else np.zeros(len(on_host), dtype=bool)
    for processor in sampler.logits_processors:
        if isinstance(processor, BadWordsState):
            found |= processor.num_bad_words.np[on_host] > 0
        elif not isinstance(processor, LogitBiasState | PenaltiesState):
            found[:] = True  # of a kind that we do not know: it may change any request
    places: list[int] = np.flatnonzero(found).tolist()
    return places


def changes_at_nodes(sampler: Any, batch: Any) -> bool:
    """Whether a request changes its logits in a way that we compute at every node: by biases, allowed tokens, a minimal
    length, penalties."""
    flags = [
        processor.use_penalty if isinstance(processor, PenaltiesState) else processor.use_logit_bias
        for processor in sampler.logits_processors
        if isinstance(processor, LogitBiasState | PenaltiesState)
    ]
    return any(of_slots[batch.idx_mapping_np].any() for of_slots in flags)


def processed(sampler: Any, batch: Any, drafts: Drafts, rows: NodeRows, logits: Tensor) -> Tensor:
    """The logits [n, V] float32 with everything applied but temperature and filters, in vLLM's order.

    drafts: of all requests; rows: whose nodes the rows of logits are. Below the roots, logits of requests of
    `token_by_token` do not count.
    """
    logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    context = LogitsContext(
        expanded_idx_mapping=batch.expanded_idx_mapping,
        idx_mapping=batch.idx_mapping,
        idx_mapping_np=batch.idx_mapping_np,
        expanded_local_pos=batch.expanded_local_pos,
        input_ids=batch.input_ids[batch.logits_indices],
        pos=batch.positions[batch.logits_indices],
        seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy(),
    )
    for processor in sampler.logits_processors:
        if isinstance(processor, PenaltiesState):
            _penalise(processor, batch, drafts, rows, logits)
        else:  # what looks at positions finds those of the nodes
            logits = processor.apply(logits, context)
    sampler.thinking_budget_state.apply(logits, context)
    return logits


def _penalise(state: PenaltiesState, batch: Any, drafts: Drafts, rows: NodeRows, logits: Tensor) -> None:
    """Apply the penalties for the text before each row, in place: the request's output, then the path from the root.

    vLLM's kernel counts the drafted tokens of the rows before a row, as of a chain; here it gets what it has to count.
    """
    asked, ends = np.flatnonzero(state.use_penalty[batch.idx_mapping_np]), batch.cu_num_logits_np
    if not len(asked):
        return
    chosen = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in asked])
    (places,) = to_device([chosen], logits.device)
    slots = batch.expanded_idx_mapping[places]
    tokens, on_path = drafted_before(drafts.tree, NodeRows(rows.requests[places], rows.nodes[places]))
    counts = state.output_bin_counts[slots].scatter_add_(1, tokens, on_path.to(torch.int32))
    order, part = torch.arange(len(places), device=logits.device), logits[places]
    apply_penalties(
        part,
        order,
        order,  # tokens that it does not read
        torch.zeros_like(order),
        state.repetition_penalty.gpu[slots],
        state.frequency_penalty.gpu[slots],
        state.presence_penalty.gpu[slots],
        state.prompt_bin_mask[slots],
        counts,
    )
    logits[places] = part


def output_logprobs(
    sampler: Any, asked: tuple[int, int], batch: Any, raw: Tensor, given: Tensor, accepted: Accepted
) -> LogprobsTensors:
    """The log probabilities that requests ask for, of one row for each place of the accepted tokens [b, E].

    asked: how many, and how many of tokens of their own, by vLLM's `get_logprobs_dims`. raw and given [b * E, V] are
    the logits that each token was drawn from, as the target gave them and as `processed` did.
    """
    b, longest = accepted.tokens.shape
    owners = batch.idx_mapping.repeat_interleave(longest)
    logits = raw
    if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
        states, logits = sampler.sampling_states, given.clone()
        states.apply_temperature(logits, owners, batch.idx_mapping_np)
        states.apply_min_p(logits, owners, batch.idx_mapping_np)
        logits = states.apply_top_k_top_p(logits, owners, batch.idx_mapping_np)
    most, most_ids = asked
    return compute_topk_scores(
        logits,
        most,
        accepted.tokens.reshape(-1),
        list(range(0, b * longest + 1, longest)),
        logprob_token_ids_state=sampler.logprob_token_ids_state,
        expanded_idx_mapping=owners,
        max_per_req_token_ids=most_ids,
        logits_mode=sampler.logprobs_mode.endswith("_logits"),
    )
