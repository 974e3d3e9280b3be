"""Measures what the parts of a round cost where our graphs serve it: it replays them over dummy requests.

Graphs are of trees of the caps, so that rounds are plain or have the caps: a shape without graphs would take longer
than its table says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime import round_costs
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.runtime.round_costs import LONG, LONG_BATCH, ReferenceTimes
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.drafter import DraftBatch
from eagle_plugin.vllm.ranks import in_any_rank
from eagle_plugin.vllm.round_costs import BUDGET, RoundTimer, seconds_of

PARTS = ("target", "extend", "draft")  # of a round of the caps, captured
Cell = tuple[str, int, int]  # a part or "plain", requests, tokens of each prefix


def has_graphs(runner: Any) -> bool:
    """Whether steps of a `TreeModelRunner` were captured."""
    return runner._step is not None and bool(runner._step.sizes())


def measure(runner: Any, caps: Shape, budget: float = BUDGET) -> Costs:
    """The costs of rounds of every captured batch size, on a `TreeModelRunner` that has its caches and no request yet.

    Larger batches, which run without graphs, are left to what their rounds take.
    """
    rounds = CapturedRounds(runner, caps)
    timer, short = rounds.timer, rounds.timer.short
    captured = sorted(runner._step.sizes())
    sizes = [b for b in captured if timer.fits(b, caps.width, short)] or captured[:1]
    long = _long(timer, sizes, caps)
    rounds.parts(sizes[0], short)  # what is allocated or read at the first time
    timer.target(sizes[0], 1, short)
    timed: ReferenceTimes[Cell] = ReferenceTimes(lambda: timer.target(1, 1, short))
    prompt = 1, 0  # in the place of a batch

    def run(batch: tuple[int, int]) -> Iterator[dict[Cell, float]]:
        if batch == prompt:
            yield {("prompt", *batch): timer.prompt_token()}
            return
        yield {(part, *batch): seconds for part, seconds in rounds.parts(*batch).items()}
        yield {("plain", *batch): timer.target(batch[0], 1, batch[1])}

    batches = [*dict.fromkeys([*long, *((b, short) for b in sizes)]), prompt]
    times = round_costs.measure(timed, batches, run, lambda batch: batch[0] <= sizes[0], in_any_rank, budget)

    def forward(part: str, rows: int, share: float = 1.0) -> Forward:
        """Of a part that has so many rows per request, and this share of the times."""
        points = [(b * rows, share * t) for (of, b, prefix), t in times.items() if (of, prefix) == (part, short)]
        cells = [(part, *cell) for cell in long]
        if not cells or any(cell not in times for cell in cells):
            return Forward(Curve.of(points))
        (_, b, prefix), _ = cells
        slope = round_costs.slope(times[cells[0]], times[cells[1]], b * (prefix - short))
        return Forward(Curve.of(points), per_key=share * slope)

    levels: Levels = runner.drafter.levels.kind
    rows, forwards = (max(n, 1) for n in levels.forwards(caps))
    extend = forward("extend", caps.max_accept_length)
    draft = forward("draft", rows, 1 / forwards)
    return Costs(
        forward("target", caps.width),
        draft,
        extend,
        # A draft of one level has no forward of the head, so that no level counts; a plain round has no draft at all,
        # but the least of it is too little for a term of its own.
        min(draft.curve.seconds) if caps.steps == 1 else 0.0,
        levels,
        times["prompt", 1, 0],
        forward("plain", 1),
    )


def is_faster_than(runner: Any, caps: Shape, costs: Costs) -> bool:
    """Whether a round of one request now takes so much less than these costs say that the machine was busy then."""
    rounds = CapturedRounds(runner, caps)
    b, short = min(runner._step.sizes()), rounds.timer.short
    return round_costs.is_much_faster([(costs.round(caps, b, b * short), lambda: sum(rounds.parts(b, short).values()))])


def _long(timer: RoundTimer, sizes: list[int], caps: Shape) -> list[tuple[int, int]]:
    """Requests and tokens of their prefixes, long and short; empty where contexts are short and cost nothing."""
    prefix = min(LONG, timer.longest)
    fitting = [b for b in sizes if b <= LONG_BATCH and timer.fits(b, caps.width, prefix)]
    return [(fitting[-1], prefix), (fitting[-1], timer.short)] if fitting and prefix >= 4 * timer.short else []


class CapturedRounds:
    """Runs rounds of the caps as served ones run them: copies into static memory, and replays."""

    def __init__(self, runner: Any, caps: Shape) -> None:
        """runner: a `TreeModelRunner` whose steps were captured, without a request."""
        self.timer = RoundTimer(runner, caps)
        self._runner, self._caps = runner, caps
        self._step: DecodeStep = runner._step

    @torch.inference_mode()
    def parts(self, b: int, prefix: int) -> dict[str, float]:
        """Seconds of the parts of a round of b requests whose prefixes have so many tokens each, by `PARTS`."""
        caps, step, device = self._caps, self._step, self._runner.device
        requests, lengths = self.timer.requests(b, prefix)
        layers = self.timer.layers(b, prefix)
        batch, params = self._batch(b, lengths), SamplingParams.greedy(b, lengths.device)
        n = b * caps.width
        self._runner.input_ids.gpu[:n] = 0
        batch.put_trees(self._runner.input_ids.gpu, self._runner.positions)
        step.begin(batch, layers)
        captured = step.can_verify(batch)

        def verify() -> Any:
            step.begin(batch, layers)
            states = step.verify()
            hidden = states[0] if isinstance(states, tuple) else states
            step.walk(batch, self._runner.model.compute_logits(hidden[:n]).float(), params, None)

        target = seconds_of(verify) if captured else self.timer.target(b, caps.width, prefix)
        # As long as the shape allows: what is read does not depend on it.
        places = torch.arange(caps.max_accept_length, device=device).expand(b, -1)
        lens = torch.full((b,), caps.max_accept_length, dtype=torch.int32, device=device)
        accepted = Accepted(places.int().contiguous(), lens, torch.zeros_like(places))
        features = step._memory.features(b)[:n].clone()
        extend = seconds_of(partial(step.extend, accepted, [features], True))
        root = step._memory.root(b, True)
        trees = DraftBatch(caps, root.lengths, layers[step._head_layer].slot_table, params, None, None)
        draft = seconds_of(partial(step.draft_tree, trees, root.tokens, root.state))
        return dict(zip(PARTS, (target, extend, draft), strict=True))

    def _batch(self, b: int, lengths: torch.Tensor) -> RoundBatch:
        """A step of requests that all verify a tree of the caps."""
        store, names = DraftStore(), [str(i) for i in range(b)]
        store.put(names, Drafts.plain(torch.zeros_like(lengths), self._caps.width)._replace(shape=self._caps))
        counts = np.full(b, self._caps.width - 1, dtype=np.int64)
        return RoundBatch.read(counts, counts + 1, names, lengths, store)
