"""Measures what the parts of a round cost where our graphs serve it: it replays them over dummy requests.

Only rounds of captured shapes are measured, and chosen later: one without graphs would take longer than its table says.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import torch

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime import round_costs
from eagle_plugin.runtime.accept import accept
from eagle_plugin.runtime.long_prefixes import long_batch
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.runtime.round_costs import Phases, ReferenceTimes, Round, costs_of
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.ranks import in_any_rank
from eagle_plugin.vllm.round_costs import BUDGET, RoundTimer, seconds_of

Key = tuple[Round, str]  # a round, and its phase or "prompt"
PROMPT: Round = 1, PLAIN, 0  # in the place of a round


def has_graphs(runner: Any) -> bool:
    """Whether steps of a `TreeModelRunner` were captured."""
    return runner._step is not None and bool(runner._step.sizes())


def measure(runner: Any, caps: Shape, budget: float = BUDGET) -> Costs:
    """The costs of rounds of captured batch sizes, on a `TreeModelRunner` that has its caches and no request yet.

    Of each size the shapes that are captured for it. Larger batches, which run without graphs, are left to what their
    rounds take.
    """
    rounds = CapturedRounds(runner, caps)
    timer, short = rounds.timer, rounds.timer.short
    captured = round_costs.sizes_to_measure(runner._step.sizes())
    shapes = {b: rounds.measured(b) for b in captured}
    sizes = [b for b in captured if shapes[b]] or captured[:1]
    for shape in shapes[sizes[0]]:
        round_costs.run_first(partial(rounds.phases, shape, sizes[0], short), in_any_rank)
    for first in (partial(timer.target, sizes[0], 1, short), partial(rounds.plain, sizes[0], short)):
        round_costs.run_first(first, in_any_rank)
    long = _long(rounds, [b for b in sizes if caps in shapes[b]], caps)
    timed: ReferenceTimes[Key] = ReferenceTimes(lambda: timer.target(1, 1, short))

    def run(batch: tuple[int, int]) -> Generator[dict[Key, float], None, None]:
        b, prefix = batch
        if batch == prompt:
            yield {(PROMPT, "prompt"): timer.prompt_token()}
            return
        for shape in shapes[b] if prefix == short else [caps]:
            phases = rounds.phases(shape, b, prefix)._asdict()
            yield {((b, shape, prefix), name): seconds for name, seconds in phases.items()}
        yield {((b, PLAIN, prefix), "target"): rounds.plain(b, prefix)}

    prompt = PROMPT[0], PROMPT[2]
    batches = [*dict.fromkeys([*long, *((b, short) for b in sizes)]), prompt]
    # The prompt is not smaller than the smallest rounds: nothing can be chosen without those.
    times = round_costs.measure(
        timed, batches, run, lambda batch: batch[0] <= sizes[0], in_any_rank, budget, lambda b: max(b[0], sizes[0])
    )
    levels: Levels = runner.drafter.levels.kind
    found = {
        (b, shape, prefix): Phases(*(times[(b, shape, prefix), name] for name in Phases._fields))
        for b, shape, prefix in dict.fromkeys(cell for cell, _ in times)
        if shape != PLAIN and prefix == short
    }
    costs = costs_of(found, levels)
    plain = Curve.of(
        (b, seconds) for ((b, shape, prefix), _), seconds in times.items() if (shape, prefix) == (PLAIN, short)
    )

    def per_key(shape: Shape, phase: str) -> float:
        """Seconds per token of the prefixes."""
        keys = [((b, shape, prefix), phase) for b, prefix in long]
        if not keys or any(key not in times for key in keys):
            return 0.0
        (b, prefix), _ = long
        at_length, at_short = (times[key] for key in keys)
        return round_costs.slope(at_length, at_short, b * (prefix - short))

    return costs._replace(
        target=costs.target._replace(per_key=per_key(caps, "target")),
        level=costs.level._replace(per_key=per_key(caps, "draft") / max(levels.forwards(caps)[1], 1)),
        extend=costs.extend._replace(per_key=per_key(caps, "extend")),
        prompt_token=times[PROMPT, "prompt"],
        plain=Forward(plain, per_key=per_key(PLAIN, "target")),
    )


def is_faster_than(runner: Any, caps: Shape, costs: Costs) -> bool:
    """Whether a round of the fewest requests that were captured, with their widest trees, now takes so much less than
    these costs say that the machine was busy then."""
    rounds = CapturedRounds(runner, caps)
    b, short = min(runner._step.sizes()), rounds.timer.short
    widest = sorted(rounds.measured(b), key=lambda shape: shape.width)[-1:]
    runs = [(costs.round(shape, b, b * short), partial(_seconds, rounds, shape, b, short)) for shape in widest]
    return round_costs.is_much_faster(runs)


def _seconds(rounds: CapturedRounds, *measured: Any) -> float:
    return sum(rounds.phases(*measured))


def _long(rounds: CapturedRounds, sizes: list[int], caps: Shape) -> list[tuple[int, int]]:
    """Requests and tokens of their prefixes, long and short; empty where contexts are short and cost nothing."""

    def target_times(b: int, prefix: int) -> Generator[float, None, None]:
        yield rounds.plain(b, prefix)
        yield rounds.phases(caps, b, prefix).target

    timer = rounds.timer
    found = long_batch(timer.long_batches(sizes, caps.width), target_times, timer.short, in_any_rank)
    return [] if found is None else [found, (found[0], timer.short)]


class CapturedRounds:
    """Runs rounds as served ones run them: copies into static memory, and replays."""

    def __init__(self, runner: Any, caps: Shape) -> None:
        """runner: a `TreeModelRunner` whose steps were captured, without a request."""
        self.timer = RoundTimer(runner, caps)
        self._runner = runner
        self._step: DecodeStep = runner._step

    def measured(self, b: int) -> list[Shape]:
        """The shapes of drafted rounds that are captured for b requests, a captured size, and that the caches hold."""
        shapes = [shape for shape in self._step.shapes_at(b) if shape != PLAIN]
        return [shape for shape in shapes if self.timer.fits(b, shape.width, self.timer.short)]

    @torch.inference_mode()
    def plain(self, b: int, prefix: int) -> float:
        """Seconds of the target, the logits and the walk in a plain step of b requests."""
        step, runner = self._step, self._runner
        if not step.has_plain(b):
            return self.timer.target(b, 1, prefix)
        requests, lengths = self.timer.requests(b, prefix)
        drafts = self.timer.inputs.drafts(b, PLAIN)
        layers, batch = self.timer.layers(b, prefix), _batch(drafts, lengths)
        params = SamplingParams.greedy(b, runner.device)
        ids, positions = runner.query_rows()
        ids[:b] = drafts.tree.tokens.view(-1)
        positions[:b] = lengths

        def forward() -> None:
            step.begin(batch, layers, is_plain=True)
            states = step.verify()
            hidden = states[0] if isinstance(states, tuple) else states
            logits = runner.model.compute_logits(hidden[:b]).float()
            accept(drafts, logits, params, requests, lengths, filters="chained")

        return seconds_of(forward)

    @torch.inference_mode()
    def phases(self, shape: Shape, b: int, prefix: int) -> Phases:
        """A round of b requests whose prefixes have so many tokens each, with trees of a captured shape."""
        step, device = self._step, self._runner.device
        requests, lengths = self.timer.requests(b, prefix)
        layers = self.timer.layers(b, prefix)
        drafts = self.timer.inputs.drafts(b, shape)
        batch, params = _batch(drafts, lengths), SamplingParams.greedy(b, lengths.device)
        n = b * shape.width
        ids, positions = self._runner.query_rows()
        ids[:n] = drafts.tree.tokens.view(-1)
        batch.put_trees(ids, positions)
        step.begin(batch, layers)
        captured = step.can_verify()

        def verify() -> Any:
            step.begin(batch, layers)
            states = step.verify()
            hidden = states[0] if isinstance(states, tuple) else states
            step.walk(batch, self._runner.model.compute_logits(hidden[:n]).float(), params, None)

        target = seconds_of(verify) if captured else self.timer.target(b, shape.width, prefix)
        # As long as the shape allows: what is read does not depend on it.
        longest = shape.max_accept_length
        places = torch.arange(longest, device=device).expand(b, -1)
        lens = torch.full((b,), longest, dtype=torch.int32, device=device)
        accepted = Accepted(places.int().contiguous(), lens, drafts.tree.tokens[:, :longest].contiguous())
        like = step._memory.features(b, shape.width)
        features = self.timer.inputs.states(n, *like.shape[1:], dtype=like.dtype)
        extend = seconds_of(partial(step.extend, accepted, [features], True))
        root = step._memory.root(b, True)
        trees = DraftBatch(shape, root.lengths, layers[step._head_layer].slot_table, params, None, None)
        draft = seconds_of(partial(step.draft_tree, trees, root.tokens, root.state))
        return Phases(draft, target, extend)


def _batch(drafts: Drafts, lengths: torch.Tensor) -> RoundBatch:
    """A step of requests that all verify a tree."""
    store, names = DraftStore(), [str(i) for i in range(len(lengths))]
    store.put(names, drafts)
    counts = np.full(len(names), drafts.shape.width - 1, dtype=np.int64)
    return RoundBatch.read(counts, counts + 1, names, lengths, store)
