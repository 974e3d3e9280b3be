"""Steps `model` and `vllm-model` of `make gpu`: what they find wrong, and their small forms on a CPU."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import model_rows, model_speed, model_start
from benchmarks.gpu.model_cases import (
    CASES,
    COMPILED,
    FULL,
    GRAPHS,
    NEED_FLASHINFER,
    SAMPLED_CASES,
    SHORT,
    SHORT_CASES,
    SMALLEST,
    cases_of,
)
from benchmarks.gpu.model_process import SERVES, EngineProcess
from benchmarks.gpu.model_rows import Measured
from benchmarks.gpu.model_speed import FLOAT32
from benchmarks.gpu.steps import Setting, StepError

TINY, GPU = Setting("cpu", tiny=True), Setting("cuda", tiny=False)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_real_model_on_a_cpu() -> None:
    found = model_speed.run(TINY)
    assert found["equal"]["equal"] == found["equal"]["texts"] == 4 and not found["failed"]
    measured = [(row["case"], row["temperature"], row["concurrency"]) for row in found["rows"]]
    assert measured == [
        ("plain", 0.0, 1),
        ("plugin", 0.0, 1),
        ("plain", 0.0, 8),
        ("plugin", 0.0, 8),
        ("plain", 1.0, 1),
        ("plugin", 1.0, 1),
    ]
    assert len(found["summary"]) == 1 + len(measured)
    assert not found["forced"] and set(found["modes"].values()) == {"eager"}


class Answers(EngineProcess):
    """An engine that has its answers already."""

    def __init__(self, name: str, text: list[list[int]], rounds: int) -> None:
        self.case, self.mode = CASES["sglang"][name], ""
        self._answer = {"text": text, "tokens": 6, "rounds": rounds, "seconds": 2.0}

    def ask(
        self, prompts: list[list[int]], temperature: float, tokens: int, forget: bool = False, timed: bool = False
    ) -> Any:
        return self._answer


PLAIN = Answers("plain-float32", [[1, 2, 3], [4, 5, 6]], 0)


def test_equal_text_passes() -> None:
    ours = Answers("plugin-float32", [[1, 2, 3], [4, 5, 6]], 2)
    assert model_speed.compare(PLAIN, ours, [[1], [2]], SMALLEST)["accept_length"] == 2.0


@pytest.mark.parametrize(
    ("text", "rounds", "message"),
    [
        ([[1, 2, 3], [4, 5, 7]], 2, "^1 of 2 greedy texts in float32 are those of plain decoding, accept length 2.00"),
        ([[1, 2, 3], [4, 5, 6]], 4, "accept length 1.00; wanted nine tenths of the texts and an accept length of 1.2"),
    ],
)
def test_another_text_is_found(text: list[list[int]], rounds: int, message: str) -> None:
    with pytest.raises(StepError, match=message):
        model_speed.compare(PLAIN, Answers("plugin-float32", text, rounds), [[1], [2]], SMALLEST)


def test_rows_and_sentences() -> None:
    engine = Answers("plugin", [[1, 2, 3], [4, 5, 6]], 2)
    found = model_speed.ask_in_groups(engine, [[1], [2]], Measured("plugin", 0.0, 1), 3)
    # Two groups of one question; the fake engine says six tokens in two seconds and two rounds to each.
    assert found == {"tokens_per_s": 3.0, "accept_length": 2.5, "text": [[1, 2, 3], [4, 5, 6]] * 2}
    about = {"what": engine.case.what, "mode": GRAPHS}
    row = model_rows.as_row(Measured("plugin", 0.0, 8), about, [found, found | {"tokens_per_s": 5.0}], plain=2.0)
    assert (row["tokens_per_s"], row["lowest"], row["highest"], row["times_plain"]) == (4.0, 3.0, 5.0, 2.0)
    assert row["repeats"] == 2
    nothing_drafted = [found | {"accept_length": 0.0}]
    about = {"what": "plain decoding", "mode": ""}
    plain = model_rows.as_row(Measured("plain", 1.0, 1), about, nothing_drafted, plain=3.0)
    alone = model_rows.as_row(Measured("plain", 1.0, 1), about, nothing_drafted, plain=None)
    assert [model_rows.as_sentence(one) for one in (row, plain, alone)] == [
        "the plugin, trees up to 3/4/16 (graphs without compilation), T = 0, 8 requests: 4 tokens/s, 2.00x plain, "
        "accept length 2.50",
        "plain decoding, T = 1, 1 request: 3 tokens/s, 1.00x plain",
        "plain decoding, T = 1, 1 request: 3 tokens/s",
    ]


def test_a_row_says_how_many_responses_are_plain_decodings() -> None:
    same, other = ({"tokens_per_s": 1.0, "accept_length": 2.0, "text": [[1], [last]]} for last in (2, 3))
    plain, plugin = (Measured(name, 0.0, 8) for name in ("plain", "plugin"))
    sampled = (plain._replace(temperature=1.0), plugin._replace(temperature=1.0))
    about = {name: {"what": name, "mode": ""} for name in ("plain", "plugin")}
    seen = {plain: [same], plugin: [other], sampled[0]: [same], sampled[1]: [same]}
    rows = model_rows.rows_of(seen, about)
    assert [row["equal_responses"] for row in rows] == [None, 0.5, None, None]
    assert model_rows.as_sentence(rows[1]).endswith("accept length 2.00, 50% of the responses are plain decoding's")
    # Plain decoding's own, of the second repeat: in bfloat16 not all of them either.
    rows = model_rows.rows_of({plain: [same, other], plugin: [other, dict(same)]}, about)
    assert [row["equal_responses"] for row in rows] == [0.5, 1.0]
    assert model_rows.rows_of({plugin: [same]}, about)[0]["equal_responses"] is None


class Starts(Answers):
    """An engine that starts, or does not, or serves by another worker than the plugin's."""

    def __init__(self, name: str, how: str = SERVES, together: threading.Barrier | None = None) -> None:
        """together: the start takes until all others wait there too."""
        super().__init__(name, [], 0)
        self._how, self._together, self.asked, self.ended = how, together, 0, False

    def log(self) -> str:
        return self._how

    @property
    def has_started(self) -> bool:
        return self._how != "does not start"

    def wait_for_start(self, limit: float) -> float:
        if self._how == "does not start":
            raise StepError(f"{self.case.what} does not answer: see the log")
        if self._together is not None:
            self._together.wait(60)
        return 1.0

    def ask(
        self, prompts: list[list[int]], temperature: float, tokens: int, forget: bool = False, timed: bool = False
    ) -> Any:
        self.asked += 1
        if self._how.startswith("fails") and self.asked > len(SMALLEST.warm_up) + 4:  # after the first row
            raise StepError(f"{self.case.what} does not answer: it has ended")
        rounds = len(prompts) if self.case.plugin else 0
        return {"text": [[1, 2, 3]] * len(prompts), "tokens": 3 * len(prompts), "rounds": rounds, "seconds": 2.0}

    def end(self) -> None:
        self.ended = True


NAMES = ("plain", "engine-tree", "plugin", "plugin-chain", *FLOAT32)


def test_engines_start_side_by_side_and_some_may_fail() -> None:
    together = threading.Barrier(len(NAMES))
    all_start = {name: Starts(name, together=together) for name in NAMES}
    failed: dict[str, str] = {}
    assert model_start.wait_for_all(dict(all_start), failed, 9.0) == all_start and not failed
    fails = {"engine-tree": "does not start", "plugin-chain": "", "plugin": "eagle-plugin 0.1.0: x"}
    engines = model_start.wait_for_all({name: Starts(name, fails.get(name, SERVES)) for name in NAMES}, failed, 9.0)
    assert list(engines) == ["plain", *FLOAT32] and failed.keys() == fails.keys()
    assert failed["engine-tree"] == "SGLang's own EAGLE-3, trees 3/4/16 does not answer: see the log"
    assert failed["plugin-chain"].startswith("the plugin, chains of 3 in every round: the plugin does not serve")


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Starts]:
    """Every case of a step starts at once; a test may say how one goes wrong."""
    engines = {name: Starts(name) for name in ("plain", "plugin", *FLOAT32)}

    @contextmanager
    def start(name: str, *places: Any) -> Iterator[Starts]:
        yield engines[name]

    monkeypatch.setattr(model_speed, "started", start)
    monkeypatch.setattr(model_speed, "need_modules", lambda *names: None)
    monkeypatch.setattr(model_speed, "target_folder", lambda name: Path(name))
    monkeypatch.setattr(model_speed, "read_prompts", lambda target: [[1], [2], [3], [4], [5]])
    return engines


def kept_of(setting: Setting) -> tuple[list[dict[str, Any]], str]:
    """What a run kept, call by call, and its error."""
    kept: list[dict[str, Any]] = []
    error = ""
    try:
        model_speed.run(setting._replace(keep=lambda result: kept.append(copy.deepcopy(result))))
    except StepError as fault:
        error = str(fault)
    return kept, error


def test_equality_comes_first_and_rows_are_kept_one_by_one(fake_engines: dict[str, Starts]) -> None:
    kept, error = kept_of(TINY)
    assert not error and "equal" not in kept[0] and kept[1]["equal"]["equal"] == 4 and not kept[1]["rows"]
    assert [len(one["rows"]) for one in kept[2:]] == [1, 2, 3, 4, 5, 6]
    assert fake_engines["plain-float32"].ended and not fake_engines["plain"].ended


def test_one_engine_that_fails_leaves_the_rows_of_the_others(fake_engines: dict[str, Starts]) -> None:
    fake_engines["plugin"]._how = f"fails {SERVES}"
    kept, error = kept_of(TINY)
    assert error == "the plugin, trees up to 3/4/16 does not answer: it has ended" and fake_engines["plugin"].ended
    rows = [(row["case"], row["temperature"], row["concurrency"]) for row in kept[-1]["rows"]]
    assert rows == [("plain", 0.0, 1), ("plugin", 0.0, 1), ("plain", 0.0, 8), ("plain", 1.0, 1)]


def test_plain_decoding_that_does_not_start(fake_engines: dict[str, Starts]) -> None:
    fake_engines["plain"]._how = "does not start"
    kept, error = kept_of(TINY)
    assert error.startswith("plain decoding does not answer")
    assert [row["case"] for row in kept[-1]["rows"]] == ["plugin"] * 3
    assert all(row["times_plain"] is None for row in kept[-1]["rows"])


def test_another_text_does_not_stop_the_measurement(fake_engines: dict[str, Starts]) -> None:
    fake_engines["plugin-float32"].ask = lambda prompts, *_: {  # type: ignore[method-assign]
        "text": [[9, 9, 9]] * len(prompts),
        "tokens": 12,
        "rounds": 4,
    }
    kept, error = kept_of(TINY)
    assert error.startswith("0 of 4 greedy texts in float32 are those of plain decoding")
    assert len(kept[-1]["rows"]) == 6 and kept[-1]["equal"] == {"sentence": error}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_what_does_not_start_compiled_starts_with_graphs(engine: str) -> None:
    """Alone: the others stay compiled, and one that another worker serves is not started again."""
    how = {"plain": SERVES, "plugin": "does not start", "plugin-chain": "another worker serves"}
    begun: list[tuple[str, str]] = []

    @contextmanager
    def start(name: str, mode: str) -> Iterator[Starts]:
        begun.append((name, mode))
        one = Starts(name, SERVES if mode == GRAPHS and engine == "vllm" and name == "plugin" else how[name])
        one.mode = mode
        yield one

    failed: dict[str, str] = {}
    with ExitStack() as stack:
        found = model_start.start_all(how, start, GPU._replace(engine=engine), stack, failed)
    if engine == "vllm":
        assert begun == [*((name, COMPILED) for name in how), ("plugin", GRAPHS)]
        assert {name: one.mode for name, one in found.items()} == {"plain": COMPILED, "plugin": GRAPHS}
        assert failed.keys() == {"plugin-chain"} and model_speed.about_of(found["plugin"])["mode"] == GRAPHS
    else:
        assert begun == [(name, GRAPHS) for name in how] and list(found) == ["plain"]
        assert failed.keys() == {"plugin", "plugin-chain"}


def test_the_short_form() -> None:
    assert SHORT.questions == 12 and SHORT.repeats == 2 and SHORT.concurrency == (1, 8, 32) and FULL.repeats == 3
    prompts = [[number] for number in range(30)]
    assert model_speed.some_of(prompts, None) == prompts == model_speed.some_of(prompts, 30)
    assert [prompt[0] for prompt in model_speed.some_of(prompts, 12)] == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27]
    for engine in ("sglang", "vllm"):
        setting = Setting("cuda", tiny=False, short=True, engine=engine)
        assert set(cases_of(engine, setting)) == set(SHORT_CASES[engine]) < set(cases_of(engine, GPU))
        assert set(model_speed.NEEDED) <= set(SHORT_CASES[engine]) and set(NEED_FLASHINFER[engine]) <= set(
            SAMPLED_CASES[engine]
        )


def test_what_is_missing_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model_speed.importlib.util, "find_spec", lambda name: None)
    assert model_speed.facts("vllm", GPU) == {"forced": True, "flashinfer": False}
    assert "the plugin serves because of EAGLE_PLUGIN=force" in capsys.readouterr().out
    assert model_speed.facts("sglang", GPU).items() >= {"forced": False, "flashinfer": False}.items()
    assert "chains of 3: not asked at temperature 1, which needs FlashInfer" in capsys.readouterr().out
    assert model_speed.sampled_cases("sglang") == ("plain", "plugin")
    monkeypatch.setattr(model_speed.importlib.util, "find_spec", lambda name: name)
    assert model_speed.sampled_cases("sglang") == SAMPLED_CASES["sglang"]
