"""vLLM as the server of the bench: its command line, and the answers of a real one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import tiny_models
from serving import VLLM_PYTHON, serving, vllm_spec

from eagle_plugin.bench.load import Completion, Sampling, accept_length, ask_all, engine_version, flush_prefix_cache
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server, child_environment
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.stream_fields import Output
from eagle_plugin.bench.vllm_server import command, verify_rounds
from eagle_plugin.core.shape import Shape
from eagle_plugin.models import head_folder
from eagle_plugin.models.shipped import HEADS

TARGET, HEAD = Path("target"), Path("head")
CHAIN = Shape.chain(3)
started = pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")


def spec(mode: str, shape: Shape = CHAIN, **changes) -> ServerSpec:
    return ServerSpec(TARGET, mode, None if mode == "plain" else HEAD, shape, engine="vllm", **changes)


def value_of(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_plain_has_no_speculative_flag_and_switches_the_plugin_off():
    args = command(spec("plain"), 1234)
    assert args[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "target"]
    assert not [arg for arg in args if "spec" in arg]
    assert value_of(args, "--host") == "127.0.0.1" and value_of(args, "--port") == "1234"
    assert int(value_of(args, "--num-gpu-blocks-override")) * int(value_of(args, "--block-size")) == 16384
    child = child_environment(spec("plain"), {"EAGLE_PLUGIN": "1", "KEPT": "yes"})
    assert child["EAGLE_PLUGIN"] == "0" and child["KEPT"] == "yes"
    # Paused in the middle of a step, a server with vLLM's own limit ended after five minutes.
    assert int(child["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) > 3600


def test_the_plugin_adds_its_tree_to_the_builtin_command():
    builtin, plugin = command(spec("builtin"), 1), command(spec("plugin"), 1)
    added = plugin.index("--additional-config")
    assert plugin[:added] + plugin[added + 2 :] == builtin
    assert json.loads(plugin[added + 1]) == {"eagle_plugin": {"depth": 3, "topk": 1}}
    wanted = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert json.loads(value_of(builtin, "--speculative-config")) == wanted
    tree = command(spec("plugin", Shape(2, 4, 8)), 1)
    assert json.loads(value_of(tree, "--speculative-config"))["num_speculative_tokens"] == 7
    assert json.loads(value_of(tree, "--additional-config")) == {"eagle_plugin": {"depth": 2, "topk": 4}}
    ahead = command(replace(spec("plugin"), is_async=True), 1)
    assert json.loads(value_of(ahead, "--additional-config"))["eagle_plugin"]["async_scheduling"] is True
    assert command(replace(spec("builtin"), is_async=True), 1) == builtin
    assert child_environment(spec("plugin"), {"EAGLE_PLUGIN": "0"})["EAGLE_PLUGIN"] == "1"
    assert child_environment(spec("builtin"), {})["EAGLE_PLUGIN"] == "0"


def test_a_head_that_drafts_in_parallel_is_served_as_one():
    """Else vLLM's own worker asks it for one token after the other."""
    for folder, wanted in ((head_folder(HEADS[0]), None), (head_folder(HEADS[1]), True)):
        for mode in ("builtin", "plugin"):
            args = command(replace(spec(mode), head=folder), 1)
            assert json.loads(value_of(args, "--speculative-config")).get("parallel_drafting") is wanted


def test_a_gpu_has_its_graphs_and_the_plugin_where_it_was_forced():
    assert "--enforce-eager" in command(spec("plain"), 1)
    assert "--enforce-eager" not in command(spec("plain", device="cuda"), 1)
    for mode, wanted in (("plain", "0"), ("builtin", "0"), ("plugin", "force")):
        assert child_environment(spec(mode, device="cuda"), {"EAGLE_PLUGIN": "force"})["EAGLE_PLUGIN"] == wanted


@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 1, 4)])
def test_the_builtin_speculation_has_no_trees(shape):
    with pytest.raises(ValueError, match=r"chains only.*wanted K/1/K\+1, for example 2/1/3"):
        command(spec("builtin", Shape(*shape)), 1)


def last_chunk(tokens: int, steps: int, accepted: int) -> SimpleNamespace:
    """The chunk with the usage: steps that verified drafts, and the draft tokens that they accepted."""
    details = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted}
    return SimpleNamespace(usage=SimpleNamespace(completion_tokens=tokens), metrics={"speculative_decoding": details})


@pytest.mark.parametrize(
    ("tokens", "steps", "accepted", "rounds"),
    [
        (33, 5, 6, 26),  # 21 plain rounds and 5 that drafted
        (33, 0, 0, 32),  # plain rounds only
        (33, 20, 12, 20),  # no plain rounds
        (33, 20, 14, 20),  # the same, and `max_tokens` cut 2 tokens off
        (1, 0, 0, 0),  # the token of the prefill
    ],
)
def test_plain_rounds_count_in_the_rounds_of_a_request(tokens: int, steps: int, accepted: int, rounds: int) -> None:
    assert verify_rounds(last_chunk(tokens, steps, accepted)) == rounds


def test_a_chunk_of_plain_decoding_has_no_rounds() -> None:
    assert verify_rounds(SimpleNamespace(usage=SimpleNamespace(completion_tokens=33), metrics=None)) is None


def test_the_accept_length_of_plain_rounds_is_one() -> None:
    def answer(chunk: SimpleNamespace, rounds: int | None) -> Completion:
        return Completion("q", Output(), "length", 1, chunk.usage.completion_tokens, 0.1, 1.0, (), rounds)

    chunks = [last_chunk(33, 5, 6), last_chunk(33, 0, 0)]
    assert accept_length(answer(chunk, verify_rounds(chunk)) for chunk in chunks) == 64 / 58
    # The control: over the steps that vLLM counts, it is more than any draft of one token could give.
    steps = [chunk.metrics["speculative_decoding"]["num_spec_steps"] for chunk in chunks]
    assert accept_length(answer(chunk, n) for chunk, n in zip(chunks, steps, strict=True)) == 6.4


def test_extra_flags_come_last():
    assert command(spec("plain", extra_flags=("--port", "7")), 1)[-2:] == ["--port", "7"]


# --------------------------------------------------------------------------------------------------------------------
# A speculating server, really started.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.tiny_llama(tmp_path_factory.mktemp("target"), head_dim=32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    head = tiny_models.tiny_eagle3_head(folder / "head", target)
    with serving([vllm_spec(target, head, CHAIN, mode="builtin")], folder / "logs") as (running,):
        yield running


def question(text: str) -> Question:
    return Question(id=text[:8], group="chat", prompt=text)


def counter(server: Server, name: str) -> float:
    """A counter of /metrics, summed over its labels."""
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}_total")]
    assert found, name
    return sum(found)


@started
@pytest.mark.server
def test_an_answer_is_read_and_its_rounds_are_the_engines_own(server):
    sampling = Sampling(max_tokens=48, ignore_eos=True)
    names = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    drafts, accepted = (counter(server, name) for name in names)
    answers = ask_all(server.endpoint, [question("tell me"), question("and now")], sampling)
    drafts, accepted = (counter(server, name) - before for name, before in zip(names, (drafts, accepted), strict=True))
    assert [answer.completion_tokens for answer in answers] == [48, 48]
    assert sum(answer.verify_rounds for answer in answers) == drafts > 0
    # The counters include the tokens after `max_tokens`, at most one chain per answer.
    delivered = 2 * (48 - 1)
    assert 0 <= drafts + accepted - delivered <= 2 * CHAIN.steps
    assert accept_length(answers) == delivered / drafts
    assert answers[0].output.text != ""


@started
@pytest.mark.server
@pytest.mark.matrix  # a second server; test_a_chunk_of_plain_decoding_has_no_rounds
def test_the_text_is_that_of_plain_decoding_which_has_no_rounds(server, target, tmp_path):
    sampling = Sampling(max_tokens=48, ignore_eos=True)
    with serving([vllm_spec(target)], tmp_path) as (plain,):
        answers = [ask_all(one.endpoint, [question("tell me")], sampling)[0] for one in (plain, server)]
    assert answers[0].verify_rounds is None
    assert answers[0].output.text == answers[1].output.text != ""


@started
@pytest.mark.server
def test_the_version_is_told(server):
    assert engine_version(server.endpoint).startswith("0.32.0")


@started
@pytest.mark.server
def test_the_prefix_cache_is_emptied(server):
    once = Sampling(max_tokens=1)
    # More than two blocks, which are 128 tokens each: where drafts are made, the last one that is found is not used.
    long = question("a river and a garden " * 30)
    ask_all(server.endpoint, [long], once)

    def hits() -> float:
        before = counter(server, "prefix_cache_hits")
        ask_all(server.endpoint, [long], once)
        return counter(server, "prefix_cache_hits") - before

    assert hits() >= 128  # the control: without a flush the prompt is found again
    flush_prefix_cache(server.endpoint)
    assert hits() == 0


@started
@pytest.mark.server
def test_the_whole_engine_pauses_and_ends_with_its_server(server):
    members = [psutil.Process(pid) for pid in server.members()]
    assert len(members) >= 3  # HTTP server, engine core, worker
    server.pause()
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{server.url}/health", timeout=0.5)
    before = [sum(process.cpu_times()[:2]) for process in members]
    time.sleep(1.0)
    assert [sum(process.cpu_times()[:2]) for process in members] == before
    server.resume()
    ask_all(server.endpoint, [question("still there")], Sampling(max_tokens=4))
    server.pause()
    server.stop()
    assert server.members() == []
    for process in members:
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
