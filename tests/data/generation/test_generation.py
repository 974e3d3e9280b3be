import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from accident_kinds import full_disk
from rich.console import Console
from token_endpoint import EOS, TokenEndpoint, answer_body, token_ids

from eagle_plugin.learning.data.answer_faults import is_looping
from eagle_plugin.learning.data.generate import main
from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.generation.rollout import assign_temperature
from eagle_plugin.learning.data.generation.run import GenerationSettings, generate
from eagle_plugin.learning.data.provenance import Terms, read_sources, write_sources
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt

QUIET = Console(quiet=True)


def chat(number: int, *turns: str, **fields) -> Prompt:
    messages = [{"role": "user", "content": turn} for turn in turns or (f"question {number}",)]
    for place in range(1, len(messages)):
        messages.insert(2 * place - 1, {"role": "assistant", "content": "recorded"})
    return Prompt(f"p{number}", "test", messages=messages, **fields)


def write(path: Path, *prompts: Prompt) -> Path:
    path.write_text("".join(map(format_prompt, prompts)))
    return path


def run(prompts: Path, out: Path, *servers: TokenEndpoint, **settings):
    with Journal(out) as journal:
        urls = [server.url for server in servers]
        chosen = GenerationSettings(first_pause_s=0.01, **settings)
        stats, endpoints = asyncio.run(generate(prompts, urls, journal, chosen, QUIET))
    return {row.id: row for row in read_rows(out)}, stats, endpoints


def skipped(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.with_suffix(".skipped.jsonl").read_text().splitlines()]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("style", ["sglang", "vllm"])
def test_ids_come_from_the_server_for_chats_and_raw_prompts(style, tmp_path, out):
    raw, ids = Prompt("text", "test", prompt="Once"), Prompt("ids", "test", prompt_ids=[5, 6], split="val")
    with TokenEndpoint(style) as server:
        rows, stats, _ = run(write(tmp_path / "p", chat(1), raw, ids), out, server, temperatures=[0.0])
    assert sorted(rows) == ["ids#0", "p1#0", "text#0"]
    asked = json.dumps([[{"role": "user", "content": "question 1"}], None, 0.0], sort_keys=True)
    assert rows["p1#0"].response_ids == token_ids(asked) and rows["p1#0"].prompt_ids == [1, *token_ids(asked, 6)]
    assert (rows["ids#0"].split, rows["ids#0"].finish, rows["ids#0"].temperature) == ("val", "stop", 0.0)
    assert stats.response_tokens == 3 * 12
    assert [5, 6] in [body.get("prompt") for body in server.requests]
    assert all(body["model"] == "the-target" and body["return_token_ids"] for body in server.requests)


def test_every_user_turn_is_answered_and_the_answer_is_fed_back(tmp_path, out):
    with TokenEndpoint() as server:
        rows, *_ = run(write(tmp_path / "p", chat(1, "a", "b", "c")), out, server, temperatures=[0.0])
    assert sorted(rows) == ["p1#0", "p1#1", "p1#2"]
    last = max(server.requests, key=lambda body: len(body.get("messages", [])))["messages"]
    assert [turn["role"] for turn in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == f"answer {rows['p1#0'].response_ids[0]}"  # not "recorded"


def tool_caller(path, body):
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        call = {"id": "new", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, answer_body("sglang", path, "x", token_ids("call"), message)
    return None


@pytest.mark.parametrize(("recorded_tool", "rows_wanted"), [("clock", 2), ("weather", 1)])
def test_a_tool_call_goes_on_only_with_a_recorded_result_of_that_tool(recorded_tool, rows_wanted, tmp_path, out):
    recorded = {"type": "function", "function": {"name": recorded_tool, "arguments": {}}, "id": "old"}
    messages = [
        {"role": "user", "content": "what time is it?"},
        {"role": "assistant", "tool_calls": [recorded]},
        {"role": "tool", "name": recorded_tool, "tool_call_id": "old", "content": "noon"},
        {"role": "assistant", "content": "It is noon."},
    ]
    prompt = Prompt("t", "test", messages=messages, tools=[{"type": "function", "function": {"name": "clock"}}])
    with TokenEndpoint(behaviour=tool_caller) as server:
        rows, *_ = run(write(tmp_path / "p", prompt), out, server, temperatures=[0.0])
    assert len(rows) == rows_wanted
    assert [skip["turn"] for skip in skipped(out)] == ([] if rows_wanted == 2 else [1])
    if rows_wanted == 2:
        assert server.requests[-1]["messages"][-1]["tool_call_id"] == "new"


def test_calls_that_no_parser_finds_are_told_from_other_calls(tmp_path, out):
    messages = [
        {"role": "user", "content": "what time is it?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}]},
        {"role": "tool", "name": "clock", "content": "noon"},
    ]
    with TokenEndpoint() as server:
        for tools in ([{"type": "function", "function": {"name": "clock"}}], None):
            run(write(tmp_path / "p", Prompt(f"t{bool(tools)}", "test", messages=messages, tools=tools)), out, server)
    reasons = {skip["prompt"]: skip["reason"] for skip in skipped(out)}
    assert "returned no call; if the target writes calls, start the server with --tool-call-parser" in reasons["tTrue"]
    assert reasons["tFalse"] == "the recorded results are for other calls"


def test_temperatures_are_assigned_and_asked_in_blocks(tmp_path, out):
    shaped = {"temperature": 0.5, "chat_template_kwargs": {"enable_thinking": False}, "top_k": 3}
    prompts = [chat(n) for n in range(20)] + [chat(99, sampling=shaped)]
    with TokenEndpoint() as server:
        rows, *_ = run(write(tmp_path / "p", *prompts), out, server, concurrency=1)
    asked = [body["temperature"] for body in server.requests if "messages" in body]
    assert asked == sorted(asked) and set(asked) == {0.0, 0.5, 1.0} and rows["p99#0"].temperature == 0.5
    assert {assign_temperature(prompts[-1], [0.7])} == {0.7}
    (own,) = [body for body in server.requests if body["temperature"] == 0.5]
    assert own["chat_template_kwargs"] == {"enable_thinking": False} and "top_k" not in own


def test_loops_are_found_and_random_text_is_not():
    rng = random.Random(0)
    for _ in range(200):
        period, start = rng.randint(1, 32), rng.randint(0, 100)
        cycle = [rng.randrange(1000) for _ in range(period)]
        text = [rng.randrange(1000) for _ in range(start)] + cycle * (400 // period + 2)
        assert is_looping(text)
        assert not is_looping([rng.randrange(1000) for _ in range(start + 300)])
    assert not is_looping([7] * 100)  # the last half has fewer than 64 tokens
    assert is_looping([7] * 128)


def test_looping_short_and_private_answers_are_dropped_and_counted(tmp_path, out):
    def behaviour(path, body):
        text = body["messages"][0]["content"] if "messages" in body else ""
        return {"question 1": [7] * 300, "question 2": [4, EOS], "question 3": [666, *range(3, 20)]}.get(text)

    prompts = write(tmp_path / "p", *[chat(n) for n in range(5)])
    with TokenEndpoint(behaviour=behaviour) as server:
        rows, stats, _ = run(prompts, out, server, is_private=lambda text: text == "answer 666")
        assert sorted(rows) == ["p0#0", "p4#0"]
        assert stats.skipped == {"looping": 1, "too short": 1, "private": 1}
        before = len(server.requests)
        rows, *_ = run(prompts, out, server)  # nothing is asked twice
        assert len(server.requests) == before and len(rows) == 2


def test_refused_rows_are_counted_with_the_reason(tmp_path, out):
    def behaviour(path, body):
        bad = body.get("messages", [{}])[-1].get("content") == "too long"
        return (400, {"message": "the prompt is too long"}) if bad else None

    with TokenEndpoint(behaviour=behaviour) as server:
        rows, stats, _ = run(write(tmp_path / "p", chat(0), chat(1, "fits", "too long")), out, server)
    assert sorted(rows) == ["p0#0", "p1#0"] and stats.skipped == {"refused": 1}
    (skip,) = skipped(out)
    assert (skip["prompt"], skip["turn"]) == ("p1", 1) and "HTTP 400" in skip["reason"] and "too long" in skip["reason"]


def test_errors_of_a_living_server_are_tried_again_now_and_in_the_next_run(tmp_path, out):
    failures = {"question 0": 2, "question 1": 5}

    def behaviour(path, body):
        text = body.get("messages", [{}])[-1].get("content")
        if failures.get(text, 0):
            failures[text] -= 1
            return 503, {"message": "busy"}
        return None

    prompts = write(tmp_path / "p", *[chat(n) for n in range(3)])
    with TokenEndpoint(behaviour=behaviour) as server:
        rows, stats, _ = run(prompts, out, server)
        assert sorted(rows) == ["p0#0", "p2#0"] and stats.postponed == 1 and skipped(out) == []
        rows, stats, _ = run(prompts, out, server)
        assert len(rows) == 3 and stats.postponed == 0


def test_a_dead_endpoint_is_named_and_the_others_do_its_work(tmp_path, out, capsys):
    prompts = write(tmp_path / "p", *[chat(n) for n in range(30)])
    with TokenEndpoint() as good:
        dying = TokenEndpoint(delay_s=0.02).__enter__()
        answer, count = dying._answer, iter(range(6))

        def die(path, body):
            if next(count, None) is None:
                dying._server.socket.close()
                raise ConnectionError
            return answer(path, body)

        dying._answer = die
        rows, _, endpoints = run(prompts, out, good, dying, concurrency=2)
        dying._server.shutdown()
        assert len(rows) == 30 and [bool(endpoint.dead) for endpoint in endpoints] == [False, True]
        # One that never answered is left out at the start.
        assert main([str(prompts), "--endpoint", good.url, "--endpoint", dying.url, "--out", f"{out}.2"]) == 0
    assert f"left out: {dying.url}" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(DataError, match="run the same command again"):
        run(prompts, tmp_path / "other.jsonl", dying)


def test_a_connection_that_ends_at_once_is_tried_again(tmp_path, out, monkeypatch):
    """anyio asks its socket for the name of the peer, and there is no socket any more."""
    connect, count = httpx.AsyncHTTPTransport.handle_async_request, iter(range(3))

    async def ended(self, request):
        if request.method == "POST" and next(count, None) is not None:
            raise AttributeError("'NoneType' object has no attribute 'getpeername'")
        return await connect(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", ended)
    with TokenEndpoint() as server:
        rows, stats, _ = run(write(tmp_path / "p", *[chat(n) for n in range(3)]), out, server)
    assert len(rows) == 3 and stats.postponed == 0


def test_rows_have_the_sources_of_their_prompts(tmp_path, out):
    """Of all files that were asked into one file of rows."""
    with TokenEndpoint() as server:
        for name, license in (("a", "mit"), ("b", "cc0-1.0")):
            prompts = write(tmp_path / name, chat(ord(name)))
            write_sources(prompts, {name: Terms(license)})
            assert main([str(prompts), "--endpoint", server.url, "--out", str(out)]) == 0
    assert read_sources(out) == {"a": Terms("mit"), "b": Terms("cc0-1.0")}


def test_a_server_without_token_ids_is_refused_before_any_row(tmp_path, out):
    def behaviour(path, body):
        return 200, {"choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}]}

    with TokenEndpoint(behaviour=behaviour) as server, pytest.raises(DataError, match="return_token_ids"):
        run(write(tmp_path / "p", chat(0)), out, server)
    assert out.read_bytes() == b"" and len(server.requests) == 1


def test_kill_minus_nine_loses_only_what_is_in_flight(tmp_path, out):
    prompts = write(tmp_path / "p", *[chat(n, "a", f"b{n}") for n in range(60)])
    killed = threading.Event()

    def hang_after_60(path, body):
        if len(server.requests) > 60:
            killed.wait(60)  # the child cannot finish before it is killed, however slow this process is

    with TokenEndpoint(behaviour=hang_after_60, delay_s=0.02) as server:
        command = [str(prompts), "--endpoint", server.url, "--concurrency", "3", "--temperature", "0"]
        script = "import sys; from eagle_plugin.learning.data.generate import main; main(sys.argv[1:])"
        child = subprocess.Popen([sys.executable, "-c", script, *command, "--out", str(out)], stderr=subprocess.DEVNULL)
        while child.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 20):
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL  # it was killed, not finished
        killed.set()
        before = len(list(read_rows(out)))
        assert 20 <= before < 120
        with out.open("ab") as file:  # and the last line is incomplete
            file.write(b'{"id":"p59#1","sour')
        asked = len(server.requests)
        main([*command, "--out", str(out)])
        assert len(server.requests) - asked <= 1 + 120 - before  # finished prompts were not asked again
        main([*command, "--out", f"{out}.whole"])
    resumed, whole = out.read_text().splitlines(), Path(f"{out}.whole").read_text().splitlines()
    assert len(resumed) == 120 and sorted(resumed) == sorted(whole)


def test_a_conversation_cut_between_two_lines_is_generated_again(tmp_path, out):
    prompts = write(tmp_path / "p", chat(0), chat(1, "a", "b", "c"))
    with TokenEndpoint() as server:
        whole, *_ = run(prompts, out, server, temperatures=[0.0], concurrency=1)
        lines = out.read_text().splitlines(keepends=True)
        assert [json.loads(line)["id"] for line in lines] == ["p0#0", "p1#2", "p1#1", "p1#0"]
        out.write_text("".join(lines[:-1]))
        again, *_ = run(prompts, out, server, temperatures=[0.0])
    assert again == whole and len(out.read_text().splitlines()) == 4


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_temperature_that_no_server_takes_is_refused(value, out, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["prompts", "--endpoint", "http://127.0.0.1:9", "--out", str(out), "--temperature", value])
    assert f"--temperature is {float(value)}, wanted a number of at least 0" in capsys.readouterr().err


def test_rows_before_a_full_disk_are_kept(tmp_path, out):
    prompts = write(tmp_path / "prompts.jsonl", chat(1), chat(2))
    with TokenEndpoint("sglang") as server:
        with (
            full_disk(),
            pytest.raises(DataError, match=r"cannot write .*rows.jsonl \(File too large\); free some space"),
        ):
            run(prompts, out, server)
        rows, _, _ = run(prompts, out, server)
    assert len(rows) == 2


def test_two_processes_do_not_write_one_file(out):
    with Journal(out), pytest.raises(DataError, match="another process"):
        Journal(out)


def test_prompts_with_one_id_are_refused(tmp_path, out):
    with pytest.raises(DataError, match="two prompts with the id 'p1'"):
        run(write(tmp_path / "p", chat(1), chat(1)), out)
