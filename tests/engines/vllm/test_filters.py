"""`target_distribution` with "chained" filters against the distribution that vLLM's own sampler draws from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as RequestParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from eagle_plugin.core.sampling import SamplingParams, target_distribution

ROWS, VOCABULARY = 60, 300
OFF = {"top_k": VOCABULARY, "top_p": 1.0, "min_p": 0.0}


def random_params(filters: set[str], gen: torch.Generator) -> SamplingParams:
    """Parameters of ROWS requests, each with about two thirds of these filters on."""

    def some(name: str, values: Tensor) -> Tensor:
        on = torch.rand(ROWS, generator=gen) < (0.67 if name in filters else 0)
        return values.where(on, torch.tensor(OFF[name], dtype=values.dtype))

    return SamplingParams.of(ROWS)._replace(
        temperatures=0.3 + 1.7 * torch.rand(ROWS, generator=gen),
        top_ks=some("top_k", torch.randint(2, 40, (ROWS,), generator=gen).int()),
        top_ps=some("top_p", 0.02 + 0.97 * torch.rand(ROWS, generator=gen)),
        min_ps=some("min_p", 0.01 + 0.3 * torch.rand(ROWS, generator=gen)),
    )


def sampled_from(logits: Tensor, params: SamplingParams, filters: set[str]) -> Tensor:
    """What vLLM's sampler draws from, [ROWS, VOCABULARY]: its probabilities after temperature and the filters."""
    config = VllmConfig()
    config.scheduler_config.max_num_seqs = ROWS
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    added = [(row, RequestParams(min_p=float(params.min_ps[row])), None, []) for row in range(ROWS)]
    processor.update_state(BatchUpdate(ROWS, removed=[], added=added, moved=[]))
    nothing = torch.zeros(ROWS)
    metadata = SamplingMetadata(
        temperature=params.temperatures,
        all_greedy=False,
        all_random=True,
        top_p=params.top_ps if "top_p" in filters else None,  # None where no request of a batch asks, as its batches do
        top_k=params.top_ks.clone() if "top_k" in filters else None,  # top-k alone writes to it
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing + 1,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([processor]),
    )
    _, logprobs = Sampler("processed_logprobs").sample(logits.clone(), metadata)
    return logprobs.exp()


def masses(logits: Tensor, p: Tensor) -> Tensor:
    """The probability of each token and its equals together: which of equals top-p keeps vLLM leaves to its sort."""
    equal = logits[:, :, None] == logits[:, None, :]
    return (equal * p.float()[:, None, :]).sum(-1)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("filters", [{"top_k"}, {"top_p"}, {"min_p"}, {"top_k", "top_p"}, {"top_k", "top_p", "min_p"}])
def test_filters_keep_what_the_engine_keeps(filters: set[str], ties: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(ROWS, VOCABULARY, generator=gen)
    if ties:
        logits = (4 * logits).round() / 4
    logits[: ROWS // 3, 20:] = -torch.inf  # a grammar's mask, which may leave fewer tokens than top_k
    params = random_params(filters, gen)
    wanted = sampled_from(logits, params, filters)
    found = target_distribution(logits, params, "chained").float()
    if not ties:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(masses(logits, found), masses(logits, wanted), rtol=2e-5, atol=1e-7)
    if len(filters) > 1 or (ties and "top_k" in filters):  # alone, the others mean the same in both
        joint = target_distribution(logits, params, "joint").float()
        assert (masses(logits, joint) - masses(logits, wanted)).abs().amax() > 1e-3
