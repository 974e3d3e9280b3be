"""Log probabilities of the output tokens, in the form that vLLM's sampler has for one token per request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.vllm.logits import min_ps
from eagle_plugin.vllm.sampling import GREEDY_BELOW


def wants_logprobs(metadata: Any) -> bool:
    """Whether a request of this vLLM ``SamplingMetadata`` asked for any."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def output_logprobs(
    sampler: Any, mode: str, metadata: Any, params: SamplingParams, raw: Tensor, processed: Tensor, accepted: Accepted
) -> LogprobsTensors:
    """One row for each place of the output tokens [b, E]; vLLM drops rows after a request's last token.

    mode is the server's --logprobs-mode; raw and processed [b * E, V] are the logits that each token was drawn from,
    as the target gave them, and with penalties, masks and biases.
    """
    max_accept_length = accepted.tokens.shape[1]
    found = raw.float()
    if mode.startswith("processed"):
        found = processed
        if not metadata.all_greedy:
            greedy = (metadata.temperature < GREEDY_BELOW).repeat_interleave(max_accept_length)
            has_min_p = min_ps(metadata, len(accepted.tokens)) is not None
            found = _filtered(processed, params.for_rows(max_accept_length), greedy, has_min_p)
    if mode.endswith("logprobs"):
        found = sampler.compute_logprobs(found)
    tokens = accepted.tokens.view(-1)
    if metadata.logprob_token_ids:
        wanted = {
            i * max_accept_length + j: ids
            for i, ids in metadata.logprob_token_ids.items()
            for j in range(max_accept_length)
        }
        return sampler.gather_specific_token_logprobs(found, wanted, tokens)
    return sampler.gather_logprobs(found, metadata.max_num_logprobs, tokens)


def _filtered(logits: Tensor, params: SamplingParams, greedy: Tensor, has_min_p: bool) -> Tensor:
    """The logits [n, V] after temperature and filters; the rows of greedy requests, [n] bool, stay as they are.

    has_min_p: whether a request has one; the device is not asked, which would be a wait.
    """
    logits = logits / params.temperatures[:, None]
    if has_min_p:
        p = logits.softmax(dim=-1)
        logits = logits.masked_fill(p < p.amax(dim=-1, keepdim=True) * params.min_ps[:, None], -torch.inf)
    top_ks = torch.where(greedy, logits.shape[1], params.top_ks.clamp(max=logits.shape[1]))
    return apply_top_k_top_p(logits, top_ks, params.top_ps)
