"""vLLM's counters of drafts and ours, against rounds counted by hand while the engine steps."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bigram_models import VOCAB, spoken
from head_edits import tensors
from log_lines import Lines
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm_bigram import PROMPTS, write_models
from vllm_engines import counters, engine, generate, runner

from eagle_plugin.core.shape import Shape
from eagle_plugin.vllm.metrics import kept_tokens, watch_rounds
from eagle_plugin.vllm.plugin_config import PluginConfig, set_plugin_config

DEPTH, NODES = 3, 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(models: tuple[Path, Path]) -> Iterator[LLM]:
    with engine(*models, depth=DEPTH, topk=2, nodes=NODES, served_model_name="bigram") as made:
        yield made


def ours() -> dict[str, float]:
    """Our metrics in this process: value by name, with the label of depth or bucket after it."""
    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples if metric.name.startswith("eagle_plugin:") else ():
            assert sample.labels.get("model_name", "bigram") == "bigram" and sample.labels["engine"] == "0"
            label = sample.labels.get("depth") or sample.labels.get("le") or sample.labels.get("shape")
            found[sample.name.removeprefix("eagle_plugin:") + (f" {label}" if label else "")] = sample.value
    return found


def step_by_step(llm: LLM, steps: int) -> list[int]:
    """The tokens that each round of each request yielded; requests are dropped in the middle of their text.

    What a request says first comes from its prefill.
    """
    settings = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(number), prompt, settings)
    generated: dict[str, int] = {}
    rounds = []
    for _ in range(steps):
        for output in llm.llm_engine.step():
            total = len(output.outputs[0].token_ids)
            if output.request_id in generated:
                rounds.append(total - generated[output.request_id])
            generated[output.request_id] = total
    llm.llm_engine.abort_request([str(number) for number in range(len(PROMPTS))])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return rounds


def test_counters_are_those_of_the_rounds(llm: LLM) -> None:
    theirs, before = counters(llm), ours()
    rounds = step_by_step(llm, 25)
    shape, reporter = f"{DEPTH}/2/{NODES}", runner(llm)._reporter
    reporter.step(has_tokens=False)  # as the step after the last request
    now, found = counters(llm), {name: value - before.get(name, 0.0) for name, value in ours().items()}
    assert len(rounds) == 24 * len(PROMPTS) and set(rounds) == set(range(1, DEPTH + 2))  # every length occurred

    assert found[f"shape_rounds_total {shape}"] == len(rounds) and found[f"shape_steps_total {shape}"] == 24
    assert found[f"shape_tokens_total {shape}"] == sum(rounds)
    assert not any(name.startswith("expected_") for name in found)  # no policy
    drafts, drafted, accepted = (
        now[f"vllm:spec_decode_num_{name}"] - theirs[f"vllm:spec_decode_num_{name}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert drafts == found["verify_rounds_total"] == len(rounds)
    assert drafted == found["drafted_tokens_total"] == (NODES - 1) * len(rounds)
    assert accepted == found["accepted_tokens_total"] == sum(rounds) - len(rounds)
    assert 1 + accepted / drafts == pytest.approx(sum(rounds) / len(rounds))  # the formula of vLLM's dashboards
    assert found["accept_length_sum"] == sum(rounds) and found["accept_length_count"] == len(rounds)
    for length in range(1, DEPTH + 2):
        assert found[f"accept_length_bucket {length}.0"] == sum(tokens <= length for tokens in rounds)
    assert f"accept_length_bucket {DEPTH + 2}.0" not in found
    for depth in range(1, DEPTH + 1):
        assert found[f"accepted_at_depth_total {depth}"] == sum(tokens > depth for tokens in rounds)
    assert f"accepted_at_depth_total {DEPTH + 1}" not in found


def test_vllms_positions_are_depths(llm: LLM) -> None:
    """It has one position per drafted token; those after the deepest level stay at zero."""
    generate(llm, PROMPTS)
    (vector,) = [metric for metric in llm.get_metrics() if metric.name.endswith("accepted_tokens_per_pos")]
    found = ours()
    assert len(vector.values) == NODES - 1 and vector.values[DEPTH:] == [0] * (NODES - 1 - DEPTH)
    assert vector.values[:DEPTH] == [found[f"accepted_at_depth_total {depth}"] for depth in range(1, DEPTH + 1)]
    assert vector.values[0] > vector.values[DEPTH - 1] > 0


@pytest.mark.parametrize("kept", [[], [0], [3, 0, 1], [2] * 4, [0, 1, 2, 3, 3]])
def test_rounds_from_a_steps_counts(kept: list[int]) -> None:
    stats = SpecDecodingStats.new(3)
    for tokens in kept:
        stats.observe_draft(num_draft_tokens=3, num_accepted_tokens=tokens)
    assert kept_tokens(stats) == sorted(kept)


def test_without_our_worker_there_is_nothing_of_ours(models: tuple[Path, Path], llm: LLM) -> None:
    """Last, since it ends the metrics of the engine above: vLLM's own chain, and plain decoding."""
    assert ours()
    for options in ({"head": models[1], "chain": True, "nodes": 4}, {}):
        with engine(models[0], **options) as other:
            generate(other, PROMPTS[:2], max_tokens=8)
            assert not ours()


def test_rejected_drafts_are_told_once(
    models: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that drafts only what the target all but never yields, in an engine without statistics too."""
    target, head = models
    shutil.copytree(head, tmp_path / "head")
    silent = sorted(set(range(VOCAB)) - set(spoken(target)))  # once in thousands of tokens
    tensors(lambda t: t.update(d2t=torch.tensor(silent[: len(t["d2t"])]) - torch.arange(len(t["d2t"]))))(
        tmp_path / "head"
    )
    logger, lines = logging.getLogger("vllm.eagle_plugin"), Lines()

    def told() -> list[str]:
        return [line for line in lines.logged if "rejected every draft" in line]

    with engine(target, tmp_path / "head", depth=DEPTH, topk=2, nodes=NODES, disable_log_stats=True) as made:
        logger.addHandler(lines)  # now: an engine configures vLLM's loggers anew
        caplog.set_level(logging.WARNING, logger.name)  # the tests show vLLM's errors only
        try:
            generate(made, PROMPTS[:2], max_tokens=95)
            assert told() == []  # 2 * 94 rounds
            generate(made, PROMPTS[:2], max_tokens=20)
            generate(made, PROMPTS[:2], max_tokens=120)
        finally:
            logger.removeHandler(lines)
    (line,) = told()
    assert "of 200 rounds in a row" in line and f"run: eagle-plugin check {target} {tmp_path / 'head'}" in line


def test_which_rounds_are_watched() -> None:
    """Not those of requests that get one token per round by design, nor those of vLLM's own drafter."""

    def reject(rounds: int, budget: int | None, speculative: Any, drafted: int = 7, asked: Any = None) -> Any:
        sampling = SimpleNamespace(thinking_token_budget=budget, extra_args={"eagle_plugin": asked})
        request = SimpleNamespace(sampling_params=sampling, spec_decode_metrics="theirs")
        scheduler = SimpleNamespace(
            vllm_config=SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(model="target")),
            requests={"a": request},
        )
        for _ in range(rounds):
            counts = {"num_draft_tokens": drafted, "num_accepted_tokens": 0, "request_id": "a"}
            found = watch_rounds(lambda self, stats, **named: (stats, named), scheduler, "stats", **counts)
            if asked == {"draft": False}:  # nobody counts it
                assert found == "stats" and request.spec_decode_metrics is None
            else:
                assert found == ("stats", counts) and request.spec_decode_metrics == "theirs"
        return getattr(scheduler, "_eagle_plugin_watch", None)

    ours = SimpleNamespace(model="head")
    set_plugin_config(ours, PluginConfig(Shape(3, 2, 8)))
    assert reject(3, None, ours) is not None
    assert reject(3, None, ours, asked={"sources": ["head"]}) is not None
    assert reject(3, None, ours, asked={"draft": False}) is None
    assert reject(3, 10, ours) is reject(3, None, ours, drafted=0) is reject(3, None, SimpleNamespace()) is None
