"""Published measurements beside the simulator's values for them, with the error.

Three numbers of the simulator are taken from measurements and are not predicted: the gap per layer of a dense target
and of a mixture of experts, from two published speeds of plain decoding; and the fixed cost of a speculative round of
the SGLang of early 2025, whose host did not work ahead, from the first batch size of the EAGLE-3 paper's table 3. That
of later engines is assumed (`OVERLAPPED`). The heads' acceptance is that of synthetic traces (`HEADS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from benchmarks.roofline import B200, H100
from benchmarks.simulate_rounds import accept_length, fixed_rate, plain_rate
from benchmarks.simulate_targets import OVERLAPPED, TARGETS, Machine
from benchmarks.simulate_traces import Outcomes, Trace, calibrate, synthesize
from eagle_plugin.core.shape import Shape


class Head(NamedTuple):
    """A published accept length that the synthetic trace of a target's head is calibrated to."""

    shape: Shape
    accept_length: float
    source: str


HEADS = {
    "Llama-3.1-8B": Head(Shape(5, 4, 64), 4.68, "sglang#4247, 5 steps, MT-bench; its topk is taken to be 4"),
    "Llama-3.3-70B": Head(
        Shape(7, 4, 64), 4.95, "5.39 of sglang#4247 (8B, 8 steps) times 5.63 / 6.13 of EAGLE-3 table 1, MT-bench"
    ),
    "Qwen3-Coder-30B-A3B": Head(Shape.chain(4), 4.30, "P-EAGLE model card, HumanEval, K = 4"),
    "GPT-OSS-120B": Head(Shape.chain(5), 2.68, "P-EAGLE model card, MT-bench, K = 5"),
}
TABLE_3 = {2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38}
SHORT = 500  # tokens of a request's prefix in MT-bench, assumed
WANTED_ERROR = 0.15  # of every predicted value
P_EAGLE_LAYERS = 2  # of the head that vllm#32887 measured


class Point(BaseModel):
    """One published measurement and the simulator's value for it."""

    model_config = ConfigDict(extra="forbid")

    source: str
    what: str
    published: float
    simulated: float
    is_fitted: bool = False  # a number of the simulator was taken from it

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


def synthetic_trace(target: str) -> Trace:
    """The trace of a target's published head."""
    head = HEADS[target]
    return synthesize(calibrate(head.shape, head.accept_length))


def fit_fixed(accepted: float) -> float:
    """The fixed cost of a speculative round, in seconds, with which table 3's first batch size is reproduced."""
    machine, chain, b = Machine(H100, TARGETS["Llama-3.1-8B"], 0.0), Shape.chain(3), min(TABLE_3)
    plain = plain_rate(machine, b, SHORT)
    return b * accepted / (TABLE_3[b] * plain) - machine.seconds(chain, b, b * SHORT)


def compare(outcomes: dict[str, Outcomes], fixed: float) -> list[Point]:
    """All published measurements."""
    llama, gpt = TARGETS["Llama-3.1-8B"], TARGETS["GPT-OSS-120B"]
    length = _lengths(outcomes["Llama-3.1-8B"])
    on_h100 = Machine(H100, llama, fixed)
    plain = plain_rate(on_h100, 1, SHORT)
    points = [Point(source="EAGLE-3 table 4, SGLang, H100, Llama-3.1-8B", what="plain, batch 1, tokens/s",
                    published=158.34, simulated=plain, is_fitted=True)]  # fmt: skip
    for b, speed_up in TABLE_3.items():
        simulated = fixed_rate(on_h100, length(Shape.chain(3)), Shape.chain(3), b, SHORT)
        points.append(
            Point(
                source="EAGLE-3 table 3, SGLang, H100, Llama-3.1-8B",
                what=f"chain of 3, batch {b}, speed-up",
                published=speed_up,
                simulated=simulated / plain_rate(on_h100, b, SHORT),
                is_fitted=b == min(TABLE_3),
            )  # fmt: skip
        )
    chain = fixed_rate(on_h100, length(Shape.chain(2)), Shape.chain(2), 1, SHORT) / plain
    points.append(Point(source="vllm#16937, vLLM, H100, Llama-3.1-8B", what="chain of 2, batch 1, speed-up",
                        published=1.65, simulated=chain))  # fmt: skip
    tree = fixed_rate(on_h100, length(Shape(7, 4, 64)), Shape(7, 4, 64), 1, SHORT)
    points.append(Point(source="sglang#4247, H100, Llama-3.1-8B (8 steps there, 7 here)",
                        what="deep tree, batch 1, tokens/s", published=378.6, simulated=tree))  # fmt: skip
    length = _lengths(outcomes["GPT-OSS-120B"])
    chains = [Shape.chain(n) for n in range(1, 8)]
    on_b200 = Machine(B200, gpt, OVERLAPPED)
    parallel = on_b200._replace(layers_of_head=P_EAGLE_LAYERS, is_parallel=True)
    for b, k, tokens, speed_up, over_eagle in ((1, 7, 561.0, 1.52, 1.12), (8, 3, 2389.0, 1.34, 1.07)):
        plain = plain_rate(on_b200, b, SHORT)
        best = max(fixed_rate(on_b200, length(shape), shape, b, SHORT) for shape in chains)
        rate = fixed_rate(parallel, length(Shape.chain(k)), Shape.chain(k), b, SHORT)
        source = "vllm#32887, vLLM, B200, GPT-OSS-120B, P-EAGLE"
        points += [
            Point(source=source, what=f"plain, batch {b}, tokens/s", published=tokens / speed_up, simulated=plain,
                  is_fitted=b == 1),
            Point(source=source, what=f"chain of {k}, batch {b}, speed-up", published=speed_up, simulated=rate / plain),
            Point(source=source, what=f"chain of {k}, batch {b}, against the best EAGLE-3 chain", published=over_eagle,
                  simulated=rate / best),
        ]  # fmt: skip
    return points


def _lengths(outcomes: Outcomes) -> Callable[[Shape], float]:
    known: dict[Shape, float] = {}

    def of(shape: Shape) -> float:
        if shape not in known:
            known[shape] = accept_length(outcomes, shape)
        return known[shape]

    return of


def verdict(points: list[Point]) -> str:
    """One sentence on how well what was predicted, and not fitted, agrees with what was measured."""
    predicted = [point for point in points if not point.is_fitted]
    errors = [abs(point.error) for point in predicted]
    far = [point for point in predicted if abs(point.error) > WANTED_ERROR]
    worst = max(predicted, key=lambda point: abs(point.error))
    start, near = "Reproduced" if not far else "NOT reproduced", len(predicted) - len(far)
    return (
        f"{start} within {WANTED_ERROR:.0%}: {near} of {len(predicted)} predicted values are; mean error "
        f"{sum(errors) / len(errors):.0%}, largest {worst.error:+.0%} ({worst.source}: {worst.what})."
    )
