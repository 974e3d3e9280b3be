"""Measures what the parts of a server's rounds cost, before the first request, once per machine and pair of models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.chooser import ShapeChooser, buffers_of
from eagle_plugin.policy.costs import Costs
from eagle_plugin.policy.log import without_policy
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime import cost_files
from eagle_plugin.runtime.captured_rounds import fits
from eagle_plugin.runtime.capturing import powers_of_two
from eagle_plugin.runtime.device_clock import clock_of
from eagle_plugin.runtime.long_prefixes import FIRST, growing_batches, long_batch
from eagle_plugin.runtime.policy_start import start_policy
from eagle_plugin.runtime.round_costs import (
    Phases,
    ReferenceTimes,
    Round,
    costs_of,
    is_much_faster,
    measure,
    per_key_and_row,
    run_first,
    sizes_to_measure,
    slope,
    timed_call,
)
from eagle_plugin.runtime.shared_times import SharedTimes
from eagle_plugin.sglang import version
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.dummy_batches import Parts, RandomBatches, parts_of
from eagle_plugin.sglang.kernel_settings import kernel_settings
from eagle_plugin.sglang.ranks import gather_objects, in_any_rank, rank_logger

BUDGET_SECONDS = 10.0  # larger batches are left out when it is spent
SHORT_PREFIX = 32

logger = logging.getLogger("eagle_plugin")


def choose_shapes(worker: Any, mode: str, most_requests: int) -> ShapeChooser:
    """What chooses the shapes of a `TreeWorker`'s rounds, by the value of ``EAGLE_POLICY``."""
    caps, captured = worker.shape, worker._round.shapes
    if mode != "auto":
        rank_logger(logger).info(without_policy(caps, mode))
    if mode == "fixed":
        return ShapeChooser(caps, None)
    shapes = captured or shapes_within(caps)
    if mode == "random":
        return ShapeChooser(caps, None, shapes)
    measurement = CostMeasurement(parts_of(worker), most_requests)
    policy = start_policy(
        caps,
        _key(worker),
        measurement.run,
        rank_logger(logger),
        shapes,
        measurement.is_faster_than,
        gather_objects,
        worker._round.padded_b,
    )
    assert worker._round.deferred is not None
    policy.costs.most_deferred = worker._round.deferred.most
    parallel, clock, share = get_parallel(), None, None
    if parallel.attn_dp_size == 1:  # else a round lasts as long as that of other requests, in other ranks
        if parallel.tp_group.rank_in_group == 0:
            clock = clock_of(worker.device)
        if parallel.tp_size > 1:
            share = SharedTimes(parallel.tp_group)
    return ShapeChooser(
        caps,
        policy,
        clock=clock,
        buffers=buffers_of(policy, most_requests, worker.device),
        learns_late=True,
        share=share,
        path_sums=worker._round.path_sums_by_shape,
    )


def _key(worker: Any) -> dict[str, Any]:
    runner, arguments = worker.target_worker.model_runner, worker.server_args
    return cost_files.key_of(
        f"sglang {version.installed()}",
        arguments.model_path,
        arguments.speculative_draft_model_path,
        torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else runner.device,
        str(runner.dtype),
        worker.shape,
        context=worker.req_to_token_pool.req_to_token.shape[1],
        cache_tokens=int(worker.token_to_kv_pool_allocator.available_size()),  # all are free
        quantization=str(runner.model_config.quantization),
        kv_cache=str(runner.kv_cache_dtype),
        ranks=get_parallel().tp_size,
        graphs=worker._round.widest(),
        requests=worker.req_to_token_pool.size,
        levels=worker.draft_worker.levels.kind,
        **kernel_settings(arguments),
    )


Batch = tuple[int, int, tuple[Shape, ...]]  # requests, tokens of each prefix, shapes of their rounds


class CostMeasurement:
    """Runs rounds of random requests on a server's own rows and slots, of all ranks at the same time."""

    def __init__(self, parts: Parts, most_requests: int) -> None:
        self._parts, self._most = parts, most_requests
        self._random = RandomBatches(parts)
        self._caps = parts.shape
        self._levels: Levels = parts.drafter.levels.kind
        captured = parts.decode_round.sizes()
        self._sizes = sizes_to_measure(captured) if captured else powers_of_two(most_requests)
        self._small_round: Callable[[], float]  # what others are compared with, in seconds
        self._long: tuple[int, int] | None = None  # requests with long prefixes, and the tokens of each

    def run(self) -> Costs:
        """Rounds of 1, 2, 4 .. requests, plain ones among them; and of a few with long prefixes.

        Where rounds are captured, only of captured batch sizes and of the shapes that are captured for each: a round
        without graphs costs more, and a curve with both kinds would tell the costs of neither.
        """
        run_first(lambda: self._phases(1, self._caps, SHORT_PREFIX), in_any_rank)
        with self._requests(1, SHORT_PREFIX):
            timed: ReferenceTimes[tuple[Round, str]] = ReferenceTimes(lambda: self._small_round())
        self._long = self._find_long()
        found = measure(
            timed,
            list(self._batches()),
            self._run,
            lambda batch: batch[0] == self._sizes[0],
            in_any_rank,
            BUDGET_SECONDS,
            lambda batch: batch[0],
        )
        cells = dict.fromkeys(cell for cell, _ in found)
        times = {cell: Phases(*(found[cell, name] for name in Phases._fields)) for cell in cells}
        short = {cell: phases for cell, phases in times.items() if cell[2] == SHORT_PREFIX}
        return self._with_context(times, costs_of(short, self._levels))

    def _batches(self) -> Iterator[Batch]:
        for b in self._sizes:
            if self._random.longest(b) < SHORT_PREFIX:
                return
            yield b, SHORT_PREFIX, self._shapes_at(b)
            if self._long is not None and b == self._long[0]:
                yield *self._long, (PLAIN, self._caps)

    def _shapes_at(self, b: int) -> tuple[Shape, ...]:
        """What is measured of so many requests: what was captured.

        Else plain rounds, those of one level, and those of the caps, without those that would have more rows than any
        captured round: what is between them is interpolated.
        """
        decode_round, caps = self._parts.decode_round, self._caps
        if decode_round.sizes():
            return decode_round.shapes_at(b)
        shapes = PLAIN, Shape(1, caps.topk, min(caps.topk + 1, caps.width)), caps
        return tuple(shape for shape in shapes if fits(shape, b))

    def is_faster_than(self, costs: Costs) -> bool:
        """Whether a round now takes so much less than these costs say that they were measured on a busy machine."""
        shapes = (PLAIN, self._caps)
        kept = [costs.round(shape, 1, SHORT_PREFIX) for shape in shapes]
        runs = [partial(lambda shape: sum(self._phases(1, shape, SHORT_PREFIX)), shape) for shape in shapes]
        return is_much_faster(list(zip(kept, runs, strict=True)))

    def _run(self, batch: Batch) -> Generator[dict[tuple[Round, str], float], None, None]:
        b, prefix, shapes = batch
        with self._requests(b, prefix) as one_round:
            for shape in shapes:
                phases = one_round(shape)._asdict()
                yield {((b, shape, prefix), name): seconds for name, seconds in phases.items()}

    def _with_context(self, times: dict[Round, Phases], costs: Costs) -> Costs:
        """The slopes over the tokens of the prefixes, where those of long ones were measured."""
        b, prefix = self._long or (0, 0)
        if (b, self._caps, prefix) not in times:
            return costs
        prefix_tokens = b * (prefix - SHORT_PREFIX)
        long, short = ([times[b, shape, tokens] for shape in (PLAIN, self._caps)] for tokens in (prefix, SHORT_PREFIX))
        plain, full = (Phases(*map(slope, x, y, [prefix_tokens] * 3)) for x, y in zip(long, short, strict=True))
        per_key, per_row = per_key_and_row(plain.target, full.target, self._caps.width)
        forwards = max(self._levels.forwards(self._caps)[1], 1)
        # Of the head's forwards no two were measured that differ in their rows alone; its rows share what is read.
        return costs._replace(
            target=costs.target._replace(per_key=per_key, per_key_and_row=per_row),
            level=costs.level._replace(per_key=full.draft / forwards),
            extend=costs.extend._replace(per_key=full.extend),
        )

    def _find_long(self) -> tuple[int, int] | None:
        """Requests with prefixes that cost something, and the tokens of each; None where there is no room for such."""
        sizes = [b for b in self._sizes if b <= self._most and self._caps in self._shapes_at(b)]
        batches = [
            batch for batch in growing_batches(sizes, self._random.longest) if batch[1] - SHORT_PREFIX >= FIRST // 4
        ]
        return long_batch(batches, self._target_times, SHORT_PREFIX, in_any_rank)

    def _target_times(self, b: int, prefix: int) -> Generator[float, None, None]:
        with self._requests(b, prefix) as one_round:
            for shape in (PLAIN, self._caps):
                yield one_round(shape).target

    def _phases(self, b: int, shape: Shape, prefix: int) -> Phases:
        with self._requests(b, prefix) as one_round:
            return one_round(shape)

    @contextmanager
    def _requests(self, b: int, prefix: int) -> Iterator[Callable[[Shape], Phases]]:
        """Requests with prefixes of so many tokens: a function that runs a round of a shape over them.

        Until the end of the block `_small_round` runs over the first of them.
        """
        with self._random.borrowed(b, prefix + self._caps.reach) as rows:
            state, alone = self._random.state(b), self._random.state(1)
            self._small_round = lambda: self._round(PLAIN, rows[:1], SHORT_PREFIX, alone).target
            yield lambda shape: self._round(shape, rows, prefix, state)

    def _round(self, shape: Shape, rows: Tensor, prefix: int, state: DraftState) -> Phases:
        b = len(rows)
        lengths = torch.full((b,), prefix, dtype=torch.int64, device=self._random.device)
        schedule = self._random.schedule(rows, lengths, greedy=True)
        padded_b = self._parts.decode_round.padded_b(b, shape)
        return self._one_round(self._parts.reader.read(shape, schedule, padded_b), state)

    def _one_round(self, batch: RoundBatch, state: DraftState) -> Phases:
        functions = self._parts.decode_round
        drafted, drafts = timed_call(partial(functions.draft, batch, state))
        verified, output = timed_call(partial(functions.verify, batch, drafts))
        walked, accepted = timed_call(partial(functions.walk, batch, drafts, output))
        # As long as the shape allows, so that the head reads all rows; in place, where the next function reads them.
        longest = accepted.index.shape[1]
        accepted.index.copy_(torch.arange(longest, device=accepted.index.device).expand_as(accepted.index))
        accepted.lengths.fill_(longest)
        extended, _ = timed_call(partial(functions.extend, batch, accepted, output, state))
        return Phases(drafted, verified + walked, extended)
