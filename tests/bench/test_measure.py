"""Statistics of a comparison, servers that really alternate, and when a comparison ends."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from eagle_plugin.bench.load import Completion, Sampling
from eagle_plugin.bench.measure import EarlyStop, Repeat, RepeatSeries, measure_interleaved, run_repeat
from eagle_plugin.bench.quartiles import Quartiles, quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.bench.steal import StealWatch, Ticks
from eagle_plugin.bench.stream_fields import Output
from eagle_plugin.bench.turns import Turn, take_turns


def answer(tokens: int, ttft_s: float, total_s: float, rounds: int | None = None) -> Completion:
    return Completion("q", Output("text"), "stop", 1, tokens, ttft_s, total_s, (), rounds)


def test_quartiles_are_median_and_quartiles():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == Quartiles(q1=2.0, median=3.0, q3=4.0)
    assert quartiles([7.0]) == Quartiles(q1=7.0, median=7.0, q3=7.0)
    with pytest.raises(ValueError, match="at least one repeat"):
        quartiles([])


def test_ratios_are_taken_within_a_repeat():
    # The machine slows down tenfold in the second repeat: the ratio of medians would be 4.0, the paired one stays 2.
    theirs, ours = [10.0, 1.0, 5.0, 10.0, 1.0], [20.0, 2.0, 20.0, 20.0, 2.0]
    assert ratio_quartiles(ours, theirs).median == 2.0
    assert quartiles(ours).median / quartiles(theirs).median == 4.0
    with pytest.raises(ValueError, match="same repeats"):
        ratio_quartiles([1.0], [1.0, 2.0])


def test_a_repeat_weighs_answers_by_their_tokens():
    repeat = Repeat((answer(101, 0.5, 2.5), answer(1, 0.1, 0.1)))
    assert repeat.tokens_per_s == pytest.approx(102 / 2.6)
    assert repeat.tpot_ms == pytest.approx(20.0)
    assert repeat.ttft_ms == pytest.approx(300.0)
    assert Repeat((answer(1, 0.1, 0.1),)).tpot_ms == 0.0


def test_accept_length_of_a_series_spans_its_turns():
    series = RepeatSeries((Repeat((answer(11, 0.1, 1, 5),)), Repeat((answer(31, 0.1, 1, 15),))))
    assert series.accept_length == 2.0


def test_rounds_alternate_and_paused_servers_rest(start_peer):
    servers = {name: start_peer(name) for name in ("plain", "ours")}
    for server in servers.values():
        server.wait_ready(30)
        server.pause()
    prompts = [Question(id=f"q{i}", group="chat", prompt="hello") for i in range(2)]
    seen: list[tuple[str, int]] = []

    turns = [Turn(number, 0, load, "repeat") for number, load in enumerate([prompts[:1], prompts[1:], prompts])]
    found: dict[str, list[Repeat]] = {name: [] for name in servers}
    for taken in take_turns(servers, turns, lambda server, load: run_repeat(server, load, Sampling(max_tokens=3))):
        seen.append((taken.name, taken.turn.repeat))
        found[taken.name].append(taken.value)
        with pytest.raises(httpx.ReadTimeout):  # the one that was asked is paused again
            httpx.get(f"{servers[taken.name].url}/health", timeout=0.2)
    assert seen == [("plain", 0), ("ours", 0), ("ours", 1), ("plain", 1), ("plain", 2), ("ours", 2)]
    assert [len(repeat.completions) for repeat in found["ours"]] == [1, 1, 2]
    assert [completion.question_id for completion in found["ours"][1].completions] == ["q1"]
    for server in servers.values():
        server.resume()
        assert httpx.get(f"{server.url}/server_info").json()["flushes"] == 3


def test_a_measurement_ends_after_a_complete_repeat(start_peer):
    servers = {name: start_peer(name, "--gap", "0.001") for name in ("plain", "ours")}
    for server in servers.values():
        server.wait_ready(30)
        server.pause()
    questions = [Question(id="q", group="chat", prompt="hello")]
    series = measure_interleaved(
        servers, [questions] * 5, Sampling(max_tokens=2), enough=lambda series: len(series["ours"].repeats) == 2
    )
    assert [len(one.repeats) for one in series.values()] == [2, 2]


def test_a_repeat_with_steal_is_made_again(start_peer):
    servers = {name: start_peer(name, "--gap", "0.001") for name in ("plain", "ours")}
    for server in servers.values():
        server.wait_ready(30)
        server.pause()
    questions = [Question(id="q", group="chat", prompt="hello")]
    # Before and after each span: the second one, of "ours", had 40 % steal.
    readings = iter([Ticks(0, 0), Ticks(100, 0), Ticks(100, 0), Ticks(160, 40), Ticks(160, 40), Ticks(260, 40)])
    logged: list[str] = []
    watch = StealWatch(2, logged.append, read=lambda: next(readings))
    series = measure_interleaved(servers, [questions], Sampling(max_tokens=2), watch=watch)
    assert [len(one.repeats) for one in series.values()] == [1, 1]
    assert (watch.spans, watch.over_limit, watch.repeated) == (3, 1, 1)
    assert logged[0].startswith("repeat 1 of 1, ours: 40%")
    asked = {}
    for name, server in servers.items():
        server.resume()
        asked[name] = httpx.get(f"{server.url}/server_info").json()["flushes"]
    assert asked == {"plain": 1, "ours": 2}


def rated(*rates: float) -> RepeatSeries:
    return RepeatSeries(tuple(Repeat((answer(100, 0.0, 100 / rate),)) for rate in rates))


def test_narrow_quartiles_end_a_comparison_after_three_repeats():
    enough = EarlyStop([("ours", "plain")])
    assert not enough({"ours": rated(20, 20), "plain": rated(10, 10)})
    assert enough.reason == "every repeat was made"
    assert enough({"ours": rated(20, 20.4, 20.2), "plain": rated(10, 10, 10)})
    assert enough.reason == "the quartiles of ours over plain are 1.0% of its median apart"


def test_wide_quartiles_go_on():
    # Quartiles 2.0 and 2.1 around 2.05 are 4.9 % apart, 2.0 and 2.15 around 2.1 are 7.1 %.
    enough = EarlyStop([("ours", "plain")])
    assert enough({"ours": rated(19.5, 20.5, 21.5), "plain": rated(10, 10, 10)})
    assert not enough({"ours": rated(19, 21, 22), "plain": rated(10, 10, 10)})


def test_after_the_time_the_quartiles_must_agree_about_the_faster_server():
    series = {"ours": rated(15, 20, 25), "plain": rated(10, 10, 10), "engine": rated(14, 14, 14)}
    assert EarlyStop([("ours", "plain"), ("ours", "engine")], decided_seconds=-1.0)(series)
    assert not EarlyStop([("ours", "plain"), ("ours", "engine")], decided_seconds=1e9)(series)
    undecided = series | {"engine": rated(20, 20, 20)}
    assert not EarlyStop([("ours", "plain"), ("ours", "engine")], decided_seconds=-1.0)(undecided)


def test_after_the_longest_time_any_spread_is_enough():
    series = {"ours": rated(15, 20, 25), "plain": rated(20, 20, 20)}
    assert not EarlyStop([("ours", "plain")], decided_seconds=-1.0)(series)
    enough = EarlyStop([("ours", "plain")], most_seconds=-1.0)
    assert enough(series) and enough.reason == "0 s of measuring"
    assert not enough({name: RepeatSeries(one.repeats[:2]) for name, one in series.items()})


def test_a_dead_server_is_named(start_peer):
    server = start_peer("mortal")
    server.wait_ready(30)
    server.stop()
    server.start()
    server.wait_ready(30)
    prompts = [Question(id="q", group="chat", prompt="hello")]
    for pid in server.members():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="mortal server ended with exit code -9 while it was being used"):
        measure_interleaved({"mortal": server}, [prompts], Sampling(max_tokens=1))


def test_questions_are_read_and_assigned_by_group(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"id": "a1", "group": "a", "prompt": "x"}\n\n{"id": "a2", "group": "a", "prompt": "y"}\n')
    second.write_text('{"id": "b1", "group": "b", "prompt": "z"}\n')
    rounds = assign_rounds(read_questions([first, second]))
    assert [[prompt.id for prompt in one] for one in rounds] == [["a1", "b1"], ["a2"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "b.jsonl:2"),
        ('{"id": "x", "group": "g"}', "prompt: Field required"),
        ('{"id": "x", "group": "g", "prompt": "p", "extra": 1}', "extra"),
        ('{"id": "a", "group": "g", "prompt": "p"}', "already used at .*b.jsonl:1"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, line, message):
    path = tmp_path / "b.jsonl"
    path.write_text('{"id": "a", "group": "g", "prompt": "p"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_questions([path])


def test_no_prompts_at_all():
    with pytest.raises(ValueError, match="no prompts"):
        read_questions([])


def test_the_shipped_questions_are_24_in_three_groups():
    shipped = sorted((Path(__file__).parents[2] / "examples/prompts").glob("*.jsonl"))
    rounds = assign_rounds(read_questions(shipped))
    assert len(rounds) == 8 and all([p.group for p in one] == ["chat", "code", "maths"] for one in rounds)
