"""Engines whose decode steps are replayed by the graph emulator say what they say without graphs, and what a target
says without drafts."""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from trained_heads import Weights, rewrite
from vllm import LLM
from vllm_engines import counters, engine, generate, rounds, runner
from vllm_greedy import GreedyModels, make_prompts, write_models

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime import captured_rounds, round_costs
from eagle_plugin.runtime.captured_rounds import FunctionKey
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm import capture, captured_costs
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.head_exchange import exchange_head

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
PROMPTS = make_prompts(12)
MATRIX = pytest.mark.matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GreedyModels:
    return write_models(tmp_path_factory.mktemp("graphs"), PROMPTS)


@contextmanager
def captured(models: GreedyModels, head: str = "reduced", asynchronous: bool = True, **options: Any) -> Iterator[LLM]:
    """An engine whose steps are captured."""
    os.environ["EAGLE_GRAPHS"] = "emulate"
    options |= {"plugin": {"async_scheduling": asynchronous}}
    try:
        with recording_launches(), engine(models.target, models.heads[head], **TREES | options) as llm:
            yield llm
    finally:
        del os.environ["EAGLE_GRAPHS"]


@contextmanager
def without_graphs(llm: LLM) -> Iterator[None]:
    """The same engine as if nothing had been captured."""
    step, runner(llm)._step = runner(llm)._step, None
    try:
        yield
    finally:
        runner(llm)._step = step


def counted(step: DecodeStep) -> Counter[str]:
    """How often each function is replayed from now on."""
    replays, run = Counter[str](), step.functions.run

    def count(key: FunctionKey, function: Any) -> Any:
        before = step.functions.replays
        result = run(key, function)
        replays[key[0]] += step.functions.replays - before
        return result

    step.functions.run = count  # type: ignore[method-assign, assignment]
    return replays


@pytest.mark.parametrize(
    ("head", "asynchronous"),
    [
        ("reduced", True),
        pytest.param("peagle", True, marks=MATRIX),  # test_decode_step.py has its captured functions
        pytest.param("reduced", False, marks=MATRIX),
        pytest.param("full", True, marks=MATRIX),
        pytest.param("eagle2", True, marks=MATRIX),
    ],
)
def test_greedy_text_by_replays(models: GreedyModels, head: str, asynchronous: bool) -> None:
    with captured(models, head, asynchronous) as llm:
        step = runner(llm)._step
        assert step.sizes() == [8, 4, 2, 1]
        assert len(step.functions) == 4 * (2 + 2 * 3)  # verify, plain too; greedy and sampled: draft, walk and extend
        replays = counted(step)
        assert generate(llm, PROMPTS) == models.expected
        served = rounds(llm)
        assert replays["draft"] > replays["verify"] == replays["walk"] == replays["extend"] > 30
        with without_graphs(llm):
            assert generate(llm, PROMPTS) == models.expected
            assert rounds(llm, served) == served  # the same trees were drafted
        assert served.tokens > 1.3 * served.count


@pytest.mark.parametrize(
    ("head", "asynchronous"),
    [("reduced", True), pytest.param("peagle", True, marks=MATRIX), pytest.param("reduced", False, marks=MATRIX)],
)
def test_text_by_replays_of_several_shapes(models: GreedyModels, head: str, asynchronous: bool) -> None:
    """Each step drafts trees of another shape: of the captured ones, and of one that has no graphs."""
    with captured(models, head, asynchronous, policy="random") as llm:
        step, run, replayed = runner(llm)._step, runner(llm)._step.functions.run, Counter[tuple[str, Any]]()
        several = captured_shapes(runner(llm)._caps, runner(llm).drafter.levels.kind)
        assert list(step.shapes) == several and len(several) == 6
        runner(llm)._shapes.chooser._shapes = [*several, Shape(2, 3, 6)]

        def count(key: FunctionKey, function: Any) -> Any:
            replayed[key[0], key[2]] += key in step.functions
            return run(key, function)

        step.functions.run = count
        for _ in range(3):
            assert generate(llm, PROMPTS) == models.expected
        for shape in several[1:]:
            assert replayed["verify", shape.width] and replayed["walk", shape] and replayed["extend", shape]
            assert replayed["draft", shape]


def test_whatever_the_scheduler_does(models: GreedyModels) -> None:
    """Chunks of prompts, cut trees, and a cache too small for all requests, between steps that are replayed."""
    prompts = [*PROMPTS, *make_prompts(8, longest=150, seed=9)]
    with captured(models, max_num_batched_tokens=72, num_gpu_blocks_override=20) as llm:
        replays = counted(runner(llm)._step)
        by_replays = generate(llm, prompts)
        assert by_replays[: len(PROMPTS)] == models.expected
        assert replays["draft"] > replays["walk"] == replays["verify"] > 5
        assert counters(llm)["vllm:num_preemptions"] > 3
        with without_graphs(llm):
            assert generate(llm, prompts) == by_replays


def test_another_head_is_captured_anew(models: GreedyModels, tmp_path: Path) -> None:
    """Graphs have the addresses of a head's weights: with those of the head before, drafts would stay as bad."""

    def other_way(weights: Weights) -> Weights:
        turned = ("down_proj.weight", "o_proj.weight", "fc.weight")
        return {name: -w if name.endswith(turned) else w for name, w in weights.items()}

    good = models.heads["reduced"]
    bad = rewrite(good, tmp_path / "bad", weights=other_way)
    with captured(models._replace(heads={"bad": bad}), "bad") as llm:
        served = runner(llm)
        assert generate(llm, PROMPTS) == models.expected
        before = rounds(llm)
        with torch.inference_mode():
            exchange_head(served, good)
        replays = counted(served._step)
        assert generate(llm, PROMPTS) == models.expected
        after = rounds(llm, before)
        assert replays["walk"] == replays["extend"] > 20
        assert after.tokens / after.count > 1.2 * before.tokens / before.count


def test_graphs_of_the_head_before_hold_no_memory(models: GreedyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy asks what is captured now how batches are padded, also where it has asked before."""
    forward = Forward(Curve((1,), (1.0,)))
    monkeypatch.setattr(captured_costs, "measure", lambda *_: Costs(forward, forward, forward))
    with captured(models, policy="auto", max_num_seqs=4) as llm:
        served = runner(llm)
        costs, before = served._shapes.chooser.policy.costs, weakref.ref(served._step)
        assert generate(llm, PROMPTS[:3]) == models.expected[:3]
        padded = costs.tabled(PLAIN, 3, 0)
        monkeypatch.setattr(capture, "powers_of_two", lambda most: [1, 2])
        with torch.inference_mode():
            exchange_head(served, models.heads["reduced"])
        gc.collect()
        assert before() is None
        assert padded == costs.tabled(PLAIN, 4, 0) > costs.tabled(PLAIN, 3, 0)
        assert generate(llm, PROMPTS[:3]) == models.expected[:3]


def test_requests_of_every_kind(models: GreedyModels) -> None:
    """Seeded text is that of eager steps; a penalty and log probabilities leave the walk to them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 6},
        {"frequency_penalty": 0.8},
        {"logprobs": 2},
    ]
    prompts = PROMPTS[:6]
    with captured(models) as llm:
        replays = counted(runner(llm)._step)
        for kind in kinds:
            replays.clear()
            by_replays = generate(llm, prompts, **kind)
            walks = 0 if kind.keys() & {"frequency_penalty", "logprobs"} else replays["extend"]
            assert replays["walk"] == walks and replays["verify"] == replays["extend"] > 20
            with without_graphs(llm):
                assert generate(llm, prompts, **kind) == by_replays


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=MATRIX)])
def test_batches_that_are_too_large_for_some_shapes(
    asynchronous: bool, models: GreedyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get narrower trees, which are replayed, also where a scheduler that is ahead has made the step for them."""
    monkeypatch.setattr(captured_rounds, "MAX_ROWS", 32)
    with captured(models, asynchronous=asynchronous, policy="auto") as llm:
        served = runner(llm)
        step, policy, widths = served._step, served._shapes.chooser.policy, Counter[tuple[int, int]]()
        assert [[shape.width for shape in step.shapes_at(b)] for b in (2, 4, 8)] == [
            [1, 2, 3, 4, 8, 16],
            [1, 2, 3, 4, 8],
            [1, 2, 3, 4],
        ]
        eager, can_draft, begin = list[Shape](), step.can_draft, step.begin

        def chosen(b: int, prefix_tokens: int, allowed: Any, *more: Any) -> Shape:
            return max(allowed or step.shapes, key=lambda shape: shape.width)

        def drafted(batch: Any, state: Any) -> bool:
            is_captured = can_draft(batch, state)
            widths[len(batch.lengths), batch.shape.width] += 1
            eager.extend([] if is_captured else [batch.shape])
            return is_captured

        def begun(batch: Any, *more: Any) -> None:
            begin(batch, *more)
            eager.extend([batch.drafts.shape] if batch.uniform and not step.can_verify() else [])

        monkeypatch.setattr(policy, "choose", chosen)
        monkeypatch.setattr(step, "can_draft", drafted)
        monkeypatch.setattr(step, "begin", begun)
        assert (
            generate(llm, PROMPTS[:1]) == models.expected[:1]
        )  # the scheduler hears of a shape; before it has the caps
        eager.clear()
        assert generate(llm, PROMPTS) == models.expected
        assert not eager and max(b for b, _ in widths) == 8
        assert max(width for b, width in widths if b <= 2) == 16


class ReplayClock:
    """Time passes only in the target's forwards that are not replayed, and in replays, by their rows."""

    FIRST = 1 / 64  # of a draft of one level
    PER_ROW: ClassVar = {"verify": 1 / 8, "walk": 1 / 16, "extend": 1 / 4, "draft": 1 / 2}

    def __init__(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        forward, replay = served._model_forward, served._step.functions.run

        def slow_forward(*given: Any, **named: Any) -> Any:
            self.now += 16.0
            return forward(*given, **named)

        def timed(key: Any, function: Any) -> Any:
            self.now += self.seconds(*key[:3]) if key in served._step.functions else 64.0
            return replay(key, function)

        monkeypatch.setattr(served, "_model_forward", slow_forward)
        monkeypatch.setattr(served._step.functions, "run", timed)
        monkeypatch.setattr(round_costs, "time", SimpleNamespace(thread_time=self.read, perf_counter=self.read))

    def seconds(self, phase: str, padded_b: int, of: Any) -> float:
        if phase == "draft":
            return self.FIRST + self.PER_ROW[phase] * padded_b * of.draft_slots
        rows = {"verify": lambda: of, "walk": lambda: of.width, "extend": lambda: of.max_accept_length}[phase]()
        return self.PER_ROW[phase] * padded_b * rows

    def read(self) -> float:
        return self.now


@MATRIX  # it starts an engine of its own; test_decode_step.py proves that captured path sums are those of eager ones
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_policy_knows_what_replays_cost(
    asynchronous: bool, models: GreedyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was captured is offered to it, and its path sums are replayed."""
    with captured(models, asynchronous=asynchronous, policy="auto") as llm:
        served = runner(llm)
        step, policy = served._step, served._shapes.chooser.policy
        several = captured_shapes(served._caps)
        assert list(policy.shapes) == list(step.shapes) == several and served._caps in several
        trees, widths = several[1:], {shape.width for shape in several}
        assert len(step.functions) == 4 * (len(widths) + 2 * 4 * len(trees))
        replays = step.functions.replays
        sums = Counter[str]()
        run = step.functions.run
        with monkeypatch.context() as patch:
            patch.setattr(step.functions, "run", lambda key, f: (sums.update([key[0]]), run(key, f))[1])
            assert generate(llm, PROMPTS) == models.expected
        assert sums["draft"] / 5 < sums["sums"] < sums["draft"] and step.functions.replays > replays

        ReplayClock(served, monkeypatch)
        with torch.inference_mode():
            costs = captured_costs.measure(served, served._caps, budget=math.inf)
        assert costs.plain is not None and costs.plain.curve == Curve((1, 2, 4, 8), (1 / 8, 1 / 4, 1 / 2, 1.0))
        assert costs.draft == ReplayClock.FIRST and costs.round(PLAIN, 4, 0) == 1 / 2
        for b in (1, 2, 4, 8):
            for shape in trees:
                rows = 3 / 16 * shape.width + shape.max_accept_length / 4 + shape.draft_slots / 2
                assert costs.round(shape, b, 0) == costs.draft + b * rows
