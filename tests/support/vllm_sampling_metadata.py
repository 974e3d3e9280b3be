"""What our code reads of vLLM's ``SamplingMetadata``, for requests with a temperature, top-k and top-p alone."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors


def sampling_metadata(
    temperature: Tensor | None = None, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> SimpleNamespace:
    """Values of the requests, [B] each; greedy without a temperature."""
    return SimpleNamespace(
        all_greedy=temperature is None,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generators={},
        no_penalties=True,
        bad_words_token_ids={},
        allowed_token_ids_mask=None,
        max_num_logprobs=None,
        logprob_token_ids=None,
        logitsprocs=LogitsProcessors([]),
        thinking_budget_state_holder=None,
    )
