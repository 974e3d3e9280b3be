"""Stops under a head that is always right: a round yields 7 tokens, and ends where plain decoding ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stop_requests import PROMPT, RUN, stop_settings, write_models
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import check_stop_strings
from vllm_engines import accept_length, engine, generate, settle

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output"}


def endings(answers: list[RequestOutput]) -> list[tuple[Any, ...]]:
    found = []
    for answer in answers:
        (choice,) = answer.outputs
        logprobs = [next(iter(position)) for position in choice.logprobs or []]
        found.append((choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason, logprobs))
    return found


def deltas(llm: LLM, settings: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """How streams end: the joined pieces of text, the tokens, the reasons."""
    for number, setting in enumerate(settings):
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **setting)
        llm.llm_engine.add_request(f"stream-{number}", PROMPT, params)
    found: dict[str, list[Any]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for answer in llm.llm_engine.step():
            text, ids, *_ = found.get(answer.request_id.split("-")[1], ["", []])
            (choice,) = answer.outputs
            ended = [text + choice.text, ids + list(choice.token_ids), choice.finish_reason, choice.stop_reason]
            found[answer.request_id.split("-")[1]] = ended
    return [tuple(found[str(number)]) for number in range(len(settings))]


def test_the_stop_that_is_complete_first_is_taken() -> None:
    """By vLLM itself, which counts no token after it; without this, a round would end as in SGLang's finish.py."""
    assert check_stop_strings("abcdef", 6, ["de", "abcde", "bc"], include_in_output=False) == ("bc", 1)


@pytest.mark.server
@pytest.mark.matrix  # no code of the plugin takes part; the test above pins what vLLM does
def test_a_round_ends_where_plain_decoding_ends(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    settings = [
        {NAMES.get(name, name): value for name, value in setting.items()}
        for setting in stop_settings(models.ids, models.pieces)
        if "stop_regex" not in setting  # vLLM has none
    ]
    params = [SamplingParams(**setting, logprobs=0) for setting in settings]
    prompts = [PROMPT] * len(settings)
    with engine(models.target) as llm:
        wanted, streams = endings(llm.generate(prompts, params, use_tqdm=False)), deltas(llm, settings)
    assert len(settings) > 150 and len({text for text, *_ in wanted}) > 3 * RUN
    assert {reason for _, _, reason, *_ in wanted} == {"stop", "length"}
    with engine(models.target, models.head, depth=RUN - 1, topk=1, nodes=RUN) as llm:
        generate(llm, [PROMPT], max_tokens=1 + 4 * RUN)
        settle(llm)
        assert accept_length(llm) == RUN  # or there was no run to end in
        found = endings(llm.generate(prompts, params, use_tqdm=False))
        differ = [(s, f, w) for s, f, w in zip(settings, found, wanted, strict=True) if f != w]
        assert not differ, f"{len(differ)} of {len(settings)} differ, the first: {differ[0]}"
        assert deltas(llm, settings) == streams
    assert [tuple(ending[:4]) for ending in wanted] == streams
