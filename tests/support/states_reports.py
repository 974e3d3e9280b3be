"""Measurements and reports of the benchmark of a trained head, with known speeds."""

from __future__ import annotations

import random
from collections.abc import Mapping

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.outputs import StealCount
from eagle_plugin.bench.states.configs import State
from eagle_plugin.bench.states.document import (
    HeadFacts,
    PromptFacts,
    StateMeasurement,
    StatesReport,
    StatesSettings,
    build_rows,
    compare,
    verdict,
)

CELLS = tuple(Cell(clients, 0.0, prompts) for prompts in ("held-out", "gsm8k") for clients in (1, 2, 4, 8))
SPEEDS: dict[State, float] = {"none": 1.0, "base": 1.3, "trained": 1.6}


def measurement(repeat: int, cell: Cell, state: State, rate: float) -> StateMeasurement:
    one = rate / cell.concurrency
    accepted = [] if state == "none" else [100, 60, 30] if state == "base" else [100, 75, 50]
    return StateMeasurement(
        repeat=repeat, concurrency=cell.concurrency, prompts=cell.prompts, state=state, seconds=2.0, requests=6,
        tokens=round(2 * rate), tokens_per_s=rate, requests_per_s=rate / 50, ttft_ms=90.0 + 10 * cell.concurrency,
        tpot_ms=1000 / one, itl_ms=1000 / one * (1 + sum(accepted[1:]) / 100), otps=one,
        accept_length=1 + sum(accepted[1:]) / 100 if accepted else None, accepted=accepted, steal=0.01, others=0.02,
    )  # fmt: skip


def measurements(
    speeds: Mapping[State, float] = SPEEDS, repeats: int = 5, noise: float = 0.03, seed: int = 0
) -> list[StateMeasurement]:
    """Rates of 20 tokens per second for one client without EAGLE, times a speed, with a relative noise."""
    draw = random.Random(seed)
    return [
        measurement(repeat, cell, state, 20 * cell.concurrency**0.7 * speed * draw.lognormvariate(0, noise))
        for repeat in range(repeats)
        for cell in CELLS
        for state, speed in speeds.items()
    ]


def states_report(ones: list[StateMeasurement] | None = None, name: str = "trained") -> StatesReport:
    """A whole document; name: of the trained head."""
    ones = measurements() if ones is None else ones
    recipe = {"optimiser": {"name": "adamw", "lr": 0.001}, "loss": {"name": "ce"}, "batch_tokens": 2048, "seed": 0}
    training = {"tokens": 2_461_014, "updates": 1282, "epochs": 3.3, "documents_sha256": "d" * 64, "recipe": recipe}
    heads: dict[State, HeadFacts] = {
        "base": HeadFacts(name="base", config_sha256="a" * 64, weights_sha256="b" * 64, kind="eagle3", training=None),
        "trained": HeadFacts(
            name=name, config_sha256="a" * 64, weights_sha256="c" * 64, kind="eagle3", training=training
        ),
    }
    measured = {one.state for one in ones}
    heads = {state: head for state, head in heads.items() if state in measured}
    comparisons = compare(ones)
    return StatesReport(
        engine="sglang", engine_version="0.5.23", target={"name": "smol", "config_sha256": "e" * 64}, heads=heads,
        verdict=verdict(comparisons, ones, "sglang 0.5.23"), comparisons=comparisons, rows=build_rows(ones),
        calibration={state: [1.02, 0.9] for state in heads},
        prompts={"held-out": PromptFacts(questions=40, sha256="f" * 64, left_out={"of split train": 3})},
        settings=StatesSettings(
            worker="plugin", dtype="bfloat16", device="cpu", threads=2, temperature=0.0, max_tokens=64,
            shapes={"trained": "2/4/8"}, busy_percent=1.0,
        ),
        steal=StealCount(limit=0.05, spans=30, over_limit=3, repeated=2, over_limit_share=0.1),
        versions={"sglang": "0.5.23", "torch": "2.9.1"},
        machine=Machine(cpu="a processor", cores=2, memory_gib=8.0, instruction_sets=["avx2"], system="Linux",
                        python="3.11"),
        date="2026-01-01T00:00:00+00:00", command=["smol", "--head", name, "--out", "benchmark"], measurements=ones,
    )  # fmt: skip
