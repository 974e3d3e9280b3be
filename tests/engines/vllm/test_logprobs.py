"""Log probabilities under speculation: of the output tokens, of the best, of those asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sampling_distribution import chain_filters, load
from torch import Tensor
from vllm import LLM, RequestOutput
from vllm_bigram import ASYNC, OPTIONS, PROMPTS, TREES, Acceptance, ask, tokens, write_models
from vllm_engines import engine

from eagle_plugin.vllm import verifier

LENGTH = 24
TOLERANCE = 2e-4  # nats: float32 logits up to 30, computed in batches of another shape
PENALTIES = {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
FILTERS = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
GREEDY: dict[str, dict[str, Any]] = {
    "best": {"logprobs": 3},
    "only the said": {"logprobs": 0},
    "all": {"logprobs": -1},
    "asked for": {"logprob_token_ids": [70, 75, 80]},
    "penalised": {"logprobs": 2} | PENALTIES,
    "of the prompt": {"prompt_logprobs": 2, "logprobs": 1},
}
LONG = " ".join(PROMPTS * 2)  # longer than the budget: read in several parts
# The default, and the one that differs most from it: each choice that a mode makes is in one of them.
MODES: dict[str, dict[str, Any]] = {"raw_logprobs": {"policy": "random"}, "processed_logits": ASYNC}
Rows = list[dict[int, float]]


class Expected(NamedTuple):
    """Plain decoding's greedy answers under each setting."""

    generated: dict[str, list[list[int]]]
    rows: dict[str, list[Rows]]
    prompts: dict[str, list[Rows]]
    ranks: dict[str, list[list[int | None]]]


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> tuple[Path, Path]:
    return write_models(checkpoints)


def options(mode: str) -> dict[str, Any]:
    return OPTIONS | {"logprobs_mode": mode, "max_logprobs": -1, "max_num_seqs": 8, "max_num_batched_tokens": 96}


def greedy(llm: LLM, setting: dict[str, Any]) -> list[RequestOutput]:
    return ask(llm, [LONG, *PROMPTS], [setting] * (1 + len(PROMPTS)), max_tokens=LENGTH)


def values_of(found: Any) -> Rows:
    return [{token: entry.logprob for token, entry in row.items()} for row in found if row is not None]


def output_rows(answers: list[RequestOutput]) -> list[Rows]:
    return [values_of(answer.outputs[0].logprobs) for answer in answers]


def ranks(answers: list[RequestOutput]) -> list[list[int | None]]:
    """vLLM's rank of each output token."""
    outputs = [answer.outputs[0] for answer in answers]
    return [[row[t].rank for t, row in zip(o.token_ids, o.logprobs or [], strict=True)] for o in outputs]


def prompt_rows(answers: list[RequestOutput]) -> list[Rows]:
    return [values_of(answer.prompt_logprobs or []) for answer in answers]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(mode: str, models: tuple[Path, Path]) -> Expected:
    with engine(models[0], **options(mode)) as plain:
        answers = {name: greedy(plain, setting) for name, setting in GREEDY.items()}
    return Expected(
        {name: tokens(each) for name, each in answers.items()},
        {name: output_rows(each) for name, each in answers.items()},
        {name: prompt_rows(each) for name, each in answers.items()},
        {name: ranks(each) for name, each in answers.items()},
    )


@pytest.fixture(scope="module")
def plugin(mode: str, expected: Expected, models: tuple[Path, Path]) -> Iterator[LLM]:
    target, head = models
    with engine(target, head, **TREES, **MODES[mode], **options(mode)) as llm:
        yield llm


def close(found: list[Rows], wanted: list[Rows]) -> bool:
    """Whether both have the same tokens in every row, with the same numbers."""
    pairs = [pair for ours, theirs in zip(found, wanted, strict=True) for pair in zip(ours, theirs, strict=True)]
    if any(ours.keys() != theirs.keys() for ours, theirs in pairs):
        return False
    both = torch.tensor([[ours[t], theirs[t]] for ours, theirs in pairs for t in ours]).view(-1, 2)
    return torch.allclose(both[:, 0], both[:, 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_values_are_those_of_plain_decoding(name: str, plugin: LLM, expected: Expected) -> None:
    acceptance = Acceptance(plugin)
    answers = greedy(plugin, GREEDY[name])
    assert acceptance.length > 1.2
    assert tokens(answers) == expected.generated[name]
    assert close(output_rows(answers), expected.rows[name])
    assert close(prompt_rows(answers), expected.prompts[name])
    assert all(expected.rows[name])
    assert ranks(answers) == expected.ranks[name]
    if name == "of the prompt":
        assert len(expected.prompts[name][0]) == len(answers[0].prompt_token_ids) - 1 > 96


def test_requests_of_all_kinds_beside_each_other(plugin: LLM, expected: Expected) -> None:
    """Without tokens named by a request: where one request names some, vLLM has no best tokens of the others."""
    names = [name for name in GREEDY if name != "asked for"]
    settings = [GREEDY[name] for name in names] + [{}, {"temperature": 1.0, "logprobs": 5}]
    answers = ask(plugin, PROMPTS[:1] * len(settings), settings, max_tokens=LENGTH)
    for i, name in enumerate(names):
        assert close(output_rows(answers[i : i + 1]), expected.rows[name][1:2]), name
    assert answers[-2].outputs[0].logprobs is None
    assert {len(row) for row in answers[-1].outputs[0].logprobs} <= {5, 6}


def expected_values(
    mode: str, target: Path, prompt: list[int], generated: list[int], setting: dict[str, Any]
) -> Tensor:
    """The values [n, V] of a sampled text by transformers and vLLM's rules, float64."""
    with torch.no_grad():
        logits = load(target)(torch.tensor([prompt + generated[:-1]])).logits[0, len(prompt) - 1 :].double()
    if mode.startswith("raw"):
        return logits if mode == "raw_logits" else logits.log_softmax(-1)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[:, prompt] = True
    for i, token in enumerate(generated[:-1]):
        seen[i + 1 :, token] = True
    times = torch.zeros_like(logits)
    for i, token in enumerate(generated[:-1]):
        times[i + 1 :, token] += 1
    scale = torch.where(seen, setting.get("repetition_penalty", 1.0), 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    logits = (logits - setting.get("frequency_penalty", 0.0) * times) / setting["temperature"]
    filters = [torch.tensor([[setting.get(name, off)]]) for name, off in (("top_k", 290), ("top_p", 1), ("min_p", 0))]
    p = chain_filters(logits.softmax(-1), filters[0].expand(len(generated), 1), *filters[1:])
    return p.log() if mode == "processed_logprobs" else logits.masked_fill(p == 0, -torch.inf)


@pytest.mark.parametrize(
    "setting", [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}, FILTERS, FILTERS | PENALTIES]
)
def test_sampled_values_are_those_of_the_mode(
    setting: dict[str, Any], mode: str, plugin: LLM, models: tuple[Path, Path]
) -> None:
    for answer in ask(plugin, PROMPTS[:4], [setting | {"logprobs": 4}] * 4, max_tokens=LENGTH):
        generated = list(answer.outputs[0].token_ids)
        wanted = expected_values(mode, models[0], list(answer.prompt_token_ids), generated, setting)
        rows = values_of(answer.outputs[0].logprobs)
        for token, row, right in zip(generated, rows, wanted, strict=True):
            assert row[token] > -torch.inf
            finite = {t: value for t, value in row.items() if value > -torch.inf}
            best = right.topk(4).indices[right.topk(4).values > -torch.inf].tolist()
            assert finite.keys() == {token, *best}
            torch.testing.assert_close(
                torch.tensor(list(finite.values()), dtype=torch.float64),
                right[list(finite)],
                atol=TOLERANCE,
                rtol=0,
            )


def test_rows_of_other_nodes_are_noticed(plugin: LLM, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every number from the row of the root."""
    whole = verifier.accepted_rows

    def roots(*arguments: Any) -> Tensor:
        rows = whole(*arguments)
        return rows[:, :1].expand_as(rows).contiguous()

    monkeypatch.setattr(verifier, "accepted_rows", roots)
    answers = greedy(plugin, GREEDY["best"])
    assert tokens(answers) == expected.generated["best"]
    assert not close(output_rows(answers), expected.rows["best"])
