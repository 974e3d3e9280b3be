"""Synthetic acceptance in real engines: steps that are captured and scheduled ahead, as on a GPU, meet the rates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import LLM
from vllm_engines import engine, generate, rounds, runner

from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.synthetic import VARIABLE, WARNING
from eagle_plugin.vllm.synthetic import synthetic_rates

TREES: dict[str, Any] = {"depth": 3, "topk": 2, "nodes": 11}  # all candidates of three levels, so that none is too flat
RATES = (0.85, 0.6, 0.4)
OWN = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [*RATES, *[0.0] * 7]}
TOKENS = 200


@contextmanager
def started(target: Path, head: Path, own: dict[str, Any]) -> Iterator[LLM]:
    """An engine whose steps are captured and scheduled ahead."""
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": TREES["nodes"] - 1} | own
    options: dict[str, Any] = {"plugin": {"async_scheduling": True}, "speculative_config": speculative}
    with recording_launches(), engine(target, head, **TREES | options) as llm:
        yield llm


def measured(llm: LLM) -> float:
    """The accept length of greedy and of sampled requests."""
    before = rounds(llm)
    for temperature in (0.0, 1.0):
        responses = generate(llm, [[3 + i, 5, 7 + i] for i in range(8)], max_tokens=TOKENS, temperature=temperature)
        assert [len(response) for response in responses] == [TOKENS] * 8
    count, tokens = rounds(llm, before)
    return tokens / count


@pytest.mark.matrix  # an engine; the rates are those of `tests/engines/test_synthetic.py`, captured and on fake CUDA
def test_by_our_variable(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Within 4 %, of some 1,100 rounds: three standard deviations of their mean. The control is the same engine, whose
    steps are captured again without rates: its head knows nothing."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    monkeypatch.setenv(VARIABLE, "3/2/11=" + ",".join(map(str, RATES)))
    with started(target, head, {}) as llm:
        assert runner(llm)._step.sizes()
        assert measured(llm) == pytest.approx(1 + sum(RATES), rel=0.04)
        runner(llm)._verifier.synthetic = None
        runner(llm).capture_steps()
        assert measured(llm) < 1.5
    assert WARNING % VARIABLE in lines


@pytest.mark.matrix  # the other way to the same rates, which the test below reads
def test_by_vllms_own_option(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with started(target, head, OWN) as llm:
        assert measured(llm) == pytest.approx(1 + sum(RATES), rel=0.04)


def test_the_option_is_read() -> None:
    assert synthetic_rates(SimpleNamespace(**OWN)) == SyntheticRates((), tuple(OWN["synthetic_acceptance_rates"]))
    assert synthetic_rates(SimpleNamespace(rejection_sample_method="standard")) is None
