"""Batches of vLLM in which requests ask for different drafts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engines import core

from eagle_plugin.runtime.request_sources import FIELD

OFF, HEAD, LOOKUP = {"draft": False}, {"sources": ["head"]}, "sources=lookup"
FIELDS: list[Any] = [None, OFF, HEAD, LOOKUP]  # what the requests of a batch say, in turn


@contextmanager
def accepted_by_field(llm: LLM) -> Iterator[dict[str, Counter[int]]]:
    """How many rounds accepted how many drafted tokens, by the field of the request, as JSON."""
    scheduler, found = core(llm).scheduler, {json.dumps(field): Counter[int]() for field in FIELDS}
    count = scheduler.make_spec_decoding_stats

    def counted(*given: Any, **named: Any) -> Any:
        asked = (scheduler.requests[named["request_id"]].sampling_params.extra_args or {}).get(FIELD)
        found[json.dumps(asked)][named["num_accepted_tokens"]] += 1
        return count(*given, **named)

    scheduler.make_spec_decoding_stats = counted
    try:
        yield found
    finally:
        del scheduler.make_spec_decoding_stats


def run_mixed(llm: LLM, prompts: Sequence[list[int]], fields: Sequence[Any], **sampling: Any) -> list[list[int]]:
    """The answers to prompts in one batch, the i-th of which says the i-th of the fields in turn; greedy."""
    settings = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "detokenize": False} | sampling
    asked = [fields[i % len(fields)] for i in range(len(prompts))]
    params = [SamplingParams(**settings, extra_args=None if field is None else {FIELD: field}) for field in asked]
    answers = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def check_mixed(
    llm: LLM, prompts: Sequence[list[int]], expected: list[list[int]], lookup: bool = True, always: bool = True
) -> None:
    """Texts are those of plain decoding, and only requests that ask for drafts, or say nothing, accept any.

    lookup: whether the server looks branches up; else who wants nothing else has no drafts. always: whether it drafts
    in all rounds or at random; a policy may find that plain decoding is faster.
    """
    with accepted_by_field(llm) as found:
        assert run_mixed(llm, prompts, FIELDS) == expected
    for field in FIELDS:
        kept = found[json.dumps(field)]
        accepted = sum(n * rounds for n, rounds in kept.items())
        wants = field != OFF and (lookup or field != LOOKUP)
        assert wants or not accepted, (field, kept)
        if always:
            assert sum(kept.values()) > 0, "no round of such a request had rows for drafts"
            assert accepted > 0 or not wants, (field, kept)
