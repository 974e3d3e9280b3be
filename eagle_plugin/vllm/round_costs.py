"""Measures what the parts of a round cost on this machine, before the first request.

The target and the head run over dummy tokens in the cache's own blocks, whose content does not matter yet.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime import round_costs
from eagle_plugin.runtime.accept import accept
from eagle_plugin.runtime.capturing import powers_of_two
from eagle_plugin.runtime.long_prefixes import growing_batches, long_batch
from eagle_plugin.runtime.parallel_levels import HeadLevels
from eagle_plugin.runtime.round import HeadState, TopM, TreeRows, top_m_of
from eagle_plugin.runtime.round_costs import ReferenceTimes
from eagle_plugin.vllm.attention import ExtendRows, Rows
from eagle_plugin.vllm.deferred_extend import DeferredRows
from eagle_plugin.vllm.dummy_batches import Places, RandomInputs, layer_metadata, places_of, served_states
from eagle_plugin.vllm.head_forwards import DraftBatch, ExtendBatch
from eagle_plugin.vllm.ranks import blocks_in_every_rank, in_any_rank, ranks_in_step

BUDGET = 12.0  # seconds: what is left of the larger batches when they are spent is not measured
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SHORT = 16  # tokens of short prefixes
PROMPT = 128  # tokens of a prompt that the head reads
READ = 2  # accepted tokens of each request before the masked rows of a draft

Timer = Callable[[int, int, int], float]  # seconds of a forward over b requests, R rows of each, prefixes of L tokens
Cell = tuple[str, int, int, int]  # a round's forward: its name, requests, rows of each, tokens of each prefix
Times = dict[Cell, float]  # seconds


def measure(runner: Any, caps: Shape, budget: float = BUDGET) -> Costs:
    """The costs of rounds under these caps, on a `TreeModelRunner` that has its caches and no request yet.

    Its requests must be able to have more tokens than a round writes.
    """
    timer = RoundTimer(runner, caps)
    levels: Levels = runner.drafter.levels.kind
    kinds: dict[str, tuple[Timer, int]] = {
        "target": (timer.target, caps.width),
        "level": (timer.level, max(levels.forwards(caps)[0], 1)),
        "extend": (timer.extend, caps.max_accept_length),
    }
    for time_forward, most in kinds.values():
        round_costs.run_first(partial(time_forward, 1, most, timer.short), in_any_rank)
    long = _long(timer, caps.width)
    ends = {name: _ends(timer, long, most) for name, (_, most) in kinds.items()}
    cells: list[Cell] = [(name, *cell) for name in kinds for cell in ends[name]]
    for total in ROWS:
        for name, (_, most) in kinds.items():
            rows = min(total, most)
            if timer.fits(total // rows, rows, timer.short):
                cells.append((name, total // rows, rows, timer.short))
    timed: ReferenceTimes[Cell] = ReferenceTimes(lambda: timer.target(1, 1, timer.short))
    prompt: Cell = "prompt", 1, PROMPT, 0

    def run(cell: Cell) -> Generator[Times, None, None]:
        name, *sizes = cell
        yield {cell: timer.prompt_token() if cell == prompt else kinds[name][0](*sizes)}

    def is_needed(cell: Cell) -> bool:
        return cell == prompt or not any(measured[0] == cell[0] for measured in timed.cells)

    times = round_costs.measure(
        timed, [*dict.fromkeys(cells), prompt], run, is_needed, in_any_rank, budget, lambda cell: cell[1] * cell[2]
    )
    forwards = {}
    for name, (_, most) in kinds.items():
        points = [
            (b * rows, seconds)
            for (of, b, rows, prefix), seconds in times.items()
            if (of, prefix) == (name, timer.short)
        ]
        forwards[name] = Forward(Curve.of(points), *_slopes(times, name, ends[name], most))
    target, level, extend = (forwards[name] for name in kinds)
    return Costs(target, level, extend, levels=levels, prompt_token=times.get(prompt, 0.0))


def is_faster_than(runner: Any, caps: Shape, costs: Costs) -> bool:
    """Whether the target's forward now takes so much less than these costs say that the machine was busy then."""
    timer = RoundTimer(runner, caps)
    timer.target(1, caps.width, timer.short)  # what is allocated, read or compiled at the first time
    runs = [
        (costs.target.seconds(1, rows, timer.short), partial(timer.target, 1, rows, timer.short))
        for rows in (1, caps.width)
    ]
    return round_costs.is_much_faster(runs)


def slots_in_every_rank(runner: Any) -> int:
    """The tokens that the KV cache has room for, as `blocks_in_every_rank`."""
    return blocks_in_every_rank(runner) * _block_size(runner)


def _block_size(runner: Any) -> int:
    return min(int(group.kv_cache_spec.block_size) for group in runner.kv_cache_config.kv_cache_groups)


def _long(timer: RoundTimer, width: int) -> tuple[int, int] | None:
    """Requests and the tokens of their long prefixes; None where contexts are so short that they cost nothing."""

    def target_times(b: int, prefix: int) -> Generator[float, None, None]:
        for rows in (1, width):
            yield timer.target(b, rows, prefix)

    batches = timer.long_batches(powers_of_two(timer.most_requests), width)
    return long_batch(batches, target_times, timer.short, in_any_rank)


def _ends(timer: RoundTimer, long: tuple[int, int] | None, most: int) -> list[tuple[int, int, int]]:
    """Rounds that differ in their prefixes, (requests, rows, tokens of each): of one row and of `most`, long and short.

    Empty where there are no long ones.
    """
    if long is None or not timer.fits(long[0], most, long[1]):
        return []
    return [(long[0], rows, length) for rows in (1, most) for length in (long[1], timer.short)]


def _slopes(times: Times, name: str, cells: Sequence[tuple[int, int, int]], most: int) -> tuple[float, float]:
    """Seconds per token of the prefixes, and per token and row of a request; most: rows of a request."""
    if not cells or any((name, *cell) not in times for cell in cells):
        return 0.0, 0.0
    one, all_rows = (
        round_costs.slope(times[(name, *long)], times[(name, *short)], long[0] * (long[2] - short[2]))
        for long, short in (cells[:2], cells[2:])
    )
    return round_costs.per_key_and_row(one, all_rows, most)


class RoundTimer:
    """Times the parts of rounds of b requests whose prefixes have so many tokens each, on a worker's runner."""

    def __init__(self, runner: Any, caps: Shape) -> None:
        """runner: a `TreeModelRunner` whose caches are allocated and that has no request."""
        self._runner, self._caps = runner, caps
        self._device: torch.device = runner.device
        self.most_requests: int = runner.max_num_reqs
        self.most_rows: int = runner.max_num_tokens
        self._reach: int = caps.reach + runner.drafter.block_rows  # positions after a prefix that a round writes
        self.longest: int = runner.max_model_len - self._reach
        self.short: int = min(SHORT, self.longest)
        groups = runner.kv_cache_config.kv_cache_groups
        self._blocks = blocks_in_every_rank(runner)
        self._slots = self._blocks * _block_size(runner)
        self._head_layers = runner.drafter._draft_attn_layer_names
        self._groups = [(group.kv_cache_spec.block_size, group.layer_names) for group in groups]
        self.inputs = RandomInputs(runner)
        self._features: Tensor

    def fits(self, b: int, rows: int, prefix: int) -> bool:
        """Whether the worker has room for such a round."""
        tokens = b * (prefix + self._reach)
        return (
            b <= self.most_requests and b * rows <= self.most_rows and tokens <= self._slots and prefix <= self.longest
        )

    def long_batches(self, sizes: Sequence[int], width: int) -> list[tuple[int, int]]:
        """`growing_batches` of these sizes whose prefixes are much longer than short ones, with trees of this width."""
        with_room = sorted(b for b in sizes if self.fits(b, width, self.short))
        batches = growing_batches(with_room, lambda b: min(self.longest, self._slots // b - self._reach))
        return [batch for batch in batches if batch[1] >= 4 * self.short]

    def target(self, b: int, rows: int, prefix: int) -> float:
        """Seconds of the target's forward over trees of `rows` nodes, the logits of every node, and the walk."""
        runner = self._runner
        requests, lengths = self.requests(b, prefix)
        ancestors = chain_ancestors(rows, self._device).repeat(b, 1)
        tree = TreeRows(requests, lengths, ancestors, rows)
        positions = (lengths[:, None] + torch.arange(rows, device=self._device)).view(-1)
        owners, slots = (
            requests.repeat_interleave(rows),
            torch.arange(prefix, prefix + rows, device=self._device).repeat(b),
        )
        layers = layer_metadata(runner, self._places(b, prefix), Rows(None, tree), owners, slots)
        drafts = self.inputs.drafts(b, PLAIN._replace(width=rows))
        params = SamplingParams.greedy(b, self._device)
        tokens = drafts.tree.tokens.view(-1)
        per_request = np.full(b, rows, dtype=np.int32)

        def forward() -> None:
            hidden, aux = served_states(runner, layers, tokens, positions, b)
            self._features = hidden if aux is None else torch.cat(aux, dim=-1)
            logits = runner.model.compute_logits(hidden).float()
            accept(drafts, logits, params, requests, lengths, filters="chained")

        with runner.maybe_select_dummy_loras(runner.lora_config, per_request, num_sampled_tokens=per_request):
            return seconds_of(forward)

    def extend(self, b: int, rows: int, prefix: int) -> float:
        """Seconds of the head's forward over `rows` accepted tokens per request, the last of which proposes."""
        return self._extend(b, rows, self._caps._replace(steps=1), prefix)

    def _extend(self, b: int, rows: int, shape: Shape, prefix: int) -> float:
        requests, lengths = self.requests(b, prefix)
        positions = (lengths[:, None] + torch.arange(rows, device=self._device)).view(-1)
        lens = torch.full_like(lengths, rows)
        extend = ExtendRows(requests, lengths + rows, lens, requests * rows)
        batch = ExtendBatch(
            tokens=self.inputs.tokens(b * rows).int(),
            positions=positions,
            states=torch.arange(b * rows, device=self._device),
            last=(requests + 1) * rows - 1,
            lengths=lengths + rows,
            rows=extend,
            lens=[rows] * b,
        )
        features = self._states(b * rows)
        table = self._head_table(b, prefix)
        drafter = self._runner.drafter
        return seconds_of(lambda: drafter.extend(batch, features, table, shape, True))

    def prompt_token(self) -> float:
        """Seconds per token of a prompt in which the head reads it, proposing nothing."""
        n = min(PROMPT, self.longest, self.most_rows)
        requests, nothing = self.requests(1, 0)
        lens = torch.full_like(requests, n)
        deferred = DeferredRows(
            tokens=self.inputs.tokens(n).int(),
            positions=torch.arange(n, device=self._device),
            features=self._states(n),
            rows=ExtendRows(requests, lens, lens, nothing),
            lens=[n],
            slot_table=self._head_table(1, n),
        )
        return seconds_of(lambda: self._runner.drafter.read_deferred(deferred)) / n

    def level(self, b: int, rows: int, prefix: int) -> float:
        """Seconds of what one forward of the head over `rows` rows per request drafts: one level, or all levels.

        Levels that come from masked rows are listed as the head reads accepted tokens.
        """
        shape = self._runner.drafter.levels.kind.one_forward(rows, self._caps.topk)
        first, all_levels = (self._draft(b, shape._replace(steps=steps), prefix) for steps in (1, shape.steps))
        return max(all_levels - first, all_levels / 10)  # noise must not make a level free

    def _draft(self, b: int, shape: Shape, prefix: int) -> float:
        """Seconds of a draft; where reading lists levels, also of the reading of `READ` accepted tokens per request."""
        requests, lengths = self.requests(b, prefix)
        drafter, m = self._runner.drafter, top_m_of(shape, True)
        levels: HeadLevels = drafter.levels
        rows = (b,) if levels.after is None else (b, shape.steps)
        hidden = self.inputs.states(*rows, drafter.hidden_size, dtype=drafter.dtype)
        sizes = (b, shape.steps, m) if levels.lists_all else (b, m)
        logp = hidden.new_zeros(sizes, dtype=torch.float32)
        top = TopM(logp, torch.arange(m, device=self._device).expand(sizes).contiguous())
        params = SamplingParams.greedy(b, self._device)
        batch = DraftBatch(shape, lengths, self._head_table(b, prefix), params, None, None)
        seconds = seconds_of(lambda: drafter.draft_tree(batch, requests, HeadState(top, hidden)))
        return seconds + self._extend(b, READ, shape, prefix) if levels.kind.depth_is_free else seconds

    def _states(self, n: int) -> Tensor:
        """What the head reads of the target's states [n, F], as wide as those of its last forward."""
        return self.inputs.states(n, self._features.shape[1], dtype=self._features.dtype)

    def layers(self, b: int, prefix: int) -> dict[str, Any]:
        """What a captured step reads of these requests' places in each layer's cache."""
        return {name: p.as_metadata() for p in self._places(b, prefix) for name in p.layers}

    def requests(self, b: int, prefix: int) -> tuple[Tensor, Tensor]:
        """Rows 0 .. b - 1, and the lengths of the prefixes."""
        requests = torch.arange(b, device=self._device)
        return requests, torch.full_like(requests, prefix)

    def _places(self, b: int, prefix: int) -> list[Places]:
        """Places for b requests in each group of caches; what they hold does not matter, so that groups may overlap."""
        positions, owned = prefix + self._reach, []
        for size, _ in self._groups:
            blocks = -(-positions // size)
            owned.append((torch.arange(b * blocks, device=self._device) % self._blocks).view(b, blocks))
        return places_of(self._runner, owned, positions)

    def _head_table(self, b: int, prefix: int) -> Tensor:
        return next(p.table for p in self._places(b, prefix) if not self._head_layers.isdisjoint(p.layers))


def seconds_of(forward: Callable[[], object]) -> float:
    """Seconds of a call; with one thread the processor's, so that other processes cost nothing.

    Threads and ranks wait for each other, and the time of one has not all of the work: of several the clock's counts.
    """
    on_gpu = torch.cuda.is_initialized()
    is_alone = not on_gpu and torch.get_num_threads() == ranks_in_step() == 1
    with torch.inference_mode():
        return round_costs.timed_call(forward, of_thread=is_alone)[0]
