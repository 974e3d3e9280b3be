"""Answers that take longer than a request may, and answers that their token limit cuts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from token_endpoint import TokenEndpoint

from eagle_plugin.learning.data.collect import _parse as parse_collect
from eagle_plugin.learning.data.generate import main, parse
from eagle_plugin.learning.data.generation.endpoints import RETRIES, RequestRefused, TargetEndpoint
from eagle_plugin.learning.data.generation.run import GenerationSettings, make_client
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt
from eagle_plugin.learning.jobs.recipe import JobRecipe
from eagle_plugin.learning.jobs.stages import data_stages

IDS = list(range(3, 27))


@pytest.mark.parametrize(
    ("failure", "asked"), [(httpx.ReadTimeout("late"), 2), (httpx.ReadError("the connection was cut"), RETRIES)]
)
def test_a_request_that_takes_too_long_is_asked_once_more(failure: httpx.TransportError, asked: int) -> None:
    """Every try begins the answer anew."""
    requests = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal requests
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "model"}]})
        requests += 1
        raise failure

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await TargetEndpoint("http://server", client, first_pause_s=0.0).complete("a", {"max_tokens": 32768})

    with pytest.raises(RequestRefused) as refused:
        asyncio.run(ask())
    assert requests == asked and f", {asked} times" in str(refused.value)
    assert ("raise --timeout" in str(refused.value)) is (asked == 2)


def test_a_server_that_answers_after_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path, 1)

    def slowly(path: str, body: dict[str, object]) -> None:
        server._delay_s = 6.0  # of the requests after this one, which asks for one token

    with TokenEndpoint(behaviour=slowly) as server:
        rows = tmp_path / "rows.jsonl"
        assert main([str(prompts), "--endpoint", server.url, "--out", str(rows), "--timeout", "2"]) == 1
        assert len([body for body in server.requests if "messages" in body]) == 2
    assert "1 prompts failed for now" in capsys.readouterr().err


@pytest.mark.parametrize("parser", [parse, lambda argv: parse_collect([*argv, "--target", "t", "--store", "s"])])
def test_the_time_limit_follows_the_longest_answer(parser: object) -> None:
    for tokens, limit in ((192, 600.0), (32768, 3276.8)):
        options = parser(["p", "--endpoint", "u", "--out", "r", "--max-tokens", str(tokens)])  # type: ignore[operator]
        client = make_client(GenerationSettings(max_tokens=tokens, timeout_s=options.timeout))
        assert client.timeout.read == limit
    assert make_client(GenerationSettings(max_tokens=32768, timeout_s=7.0)).timeout.read == 7.0


@pytest.mark.parametrize("cut", [2, 3])
def test_many_answers_that_are_cut(cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One in five is no reason for a warning, three in ten are."""
    prompts, left = write_prompts(tmp_path, 10), cut

    def answer(path: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        nonlocal left
        left -= "messages" in body
        finish = "length" if "messages" in body and left >= 0 else "stop"
        choice = {"prompt_token_ids": [1], "token_ids": IDS, "finish_reason": finish, "text": "a"}
        return 200, {"choices": [choice | {"message": {"role": "assistant", "content": "a"}}]}

    with TokenEndpoint(behaviour=answer) as server:
        assert main([str(prompts), "--endpoint", server.url, "--out", str(tmp_path / "rows.jsonl")]) == 0
    warning = "warning: 30% of the answers were cut at 192 tokens"
    printed = capsys.readouterr().err
    assert (warning in printed) is ("raise --max-tokens" in printed) is (cut == 3)


def test_the_time_limit_of_a_job(tiny_target: Path, tmp_path: Path) -> None:
    values = {"target": str(tiny_target), "prompts": {"builtin": 1}, "train": {"a": {}}}
    for timeout, given in ((None, []), (900, ["--timeout", "900.0"])):
        job = JobRecipe.model_validate({**values, "generate": {"endpoints": ["http://h"], "timeout": timeout}})
        stage = next(one for one in data_stages(job, tiny_target, tmp_path) if one.name == "answers of the target")
        assert [x for k, x in enumerate(stage.args) if "--timeout" in stage.args[max(k - 1, 0) : k + 1]] == given


def write_prompts(folder: Path, count: int) -> Path:
    own = [Prompt(f"p{n}", "test", messages=[{"role": "user", "content": f"question {n}"}]) for n in range(count)]
    file = folder / "prompts.jsonl"
    file.write_text("".join(map(format_prompt, own)))
    return file
