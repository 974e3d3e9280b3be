"""The functions of a decode round, captured by the graph emulator and replayed on other batches, equal eager ones.

The two models are small, with one layer of real tree attention over a paged cache. Faults that a capture hides are
planted and must be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from policy_world import device
from toy_engine import COLUMNS, DRAFT_V, ROWS, SHAPE, TABLE, Drafter, H, ParallelDrafter, V, Verifier

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import AcceptedPath
from eagle_plugin.policy.chooser import ShapeChooser, buffers_of
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime import captured_rounds
from eagle_plugin.runtime.graph_emulator import CaptureError, EmulatedCapturer, recording_launches
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import Drafts, HeadState, TopM
from eagle_plugin.sglang import decode_round
from eagle_plugin.sglang.batch import BatchReader, RoundBatch
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.verifier import TargetOutput

SIZES = [1, 2, 4, 8]
SHAPES = captured_shapes(SHAPE)


def random_batch(seed: int) -> tuple[Any, DraftState, Shape]:
    g = torch.Generator().manual_seed(seed)
    b = int(torch.randint(1, SIZES[-1] + 1, (), generator=g))
    greedy = seed % 3 == 0
    info = SimpleNamespace(
        temperatures=torch.full((b, 1), 1.0 if greedy else 0.9),
        top_ks=torch.full((b,), 1 if greedy else V, dtype=torch.int32),
        top_ps=torch.full((b,), 1.0 if greedy else 0.95),
        min_ps=torch.zeros(b),
        is_all_greedy=greedy,
    )
    batch = SimpleNamespace(
        seq_lens=torch.randint(2, COLUMNS - SHAPE.reach - 1, (b,), generator=g),
        req_pool_indices=torch.randperm(ROWS - 1, generator=g)[:b] + 1,
        sampling_info=info,
    )
    logp = torch.randn(b, DRAFT_V, generator=g).log_softmax(1).sort(descending=True).values
    tokens = torch.stack([torch.randperm(DRAFT_V, generator=g) for _ in range(b)])
    hidden, roots = torch.randn(b, H, generator=g), torch.randint(0, V, (b,), generator=g)
    state = DraftState(HeadState(TopM(logp, tokens), hidden), roots)
    return batch, state, SHAPES[seed % len(SHAPES)]


@pytest.fixture(scope="module")
def recorded() -> Iterator[None]:
    """Launches of native kernels are seen by captures; rounds without graphs read the same rows as captured ones."""
    with recording_launches(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_round, "without_spare_places", lambda accepted: accepted)
        yield


class Case:
    """A round whose functions are captured, and what it does on a batch."""

    def __init__(self, kind: type[DecodeRound] = DecodeRound, drafter: type[Drafter] = Drafter) -> None:
        self.drafter, self.verifier = drafter(), Verifier()
        keys = KeyTable(ROWS, "cpu", seed=1)
        self.reader = BatchReader(SHAPE.reach, SIZES[-1], TABLE, keys, least=SHAPE.reach)
        self.reader._keys.table.random_(generator=torch.Generator().manual_seed(9))
        self.round = kind(self.drafter, self.verifier, self.reader)
        models = self.drafter.model, self.verifier.model
        self.caches = [cache for model in models for cache in (model.keys, model.values)]

    walks_eagerly = False  # as for requests with penalties, whose walk is not captured
    most_in_other_ranks = 0  # requests of another rank of data-parallel attention

    def run(self, seed: int, captured: bool) -> dict[str, Tensor]:
        """Results of one round [b], and the caches after it; the caches are put back."""
        schedule, state, shape = random_batch(seed)
        b = len(schedule.seq_lens)
        before = [cache.clone() for cache in self.caches]
        of = self.round if captured else DecodeRound(self.drafter, self.verifier, self.reader)
        batch = self.reader.read(shape, schedule, of.padded_b(max(b, self.most_in_other_ranks), shape))
        drafts, output, accepted, after = self._round(batch, state, of)
        kept = {f"tree.{name}": x[:b] for name, x in drafts.tree._asdict().items()}
        kept |= {f"accepted.{name}": x[:b] for name, x in accepted._asdict().items()}
        kept |= {f"state.{i}": x[:b] for i, x in enumerate(tree_leaves(after))}
        kept["logits"] = output.logits[: b * shape.width]
        kept["features"] = output.features[: b * shape.width]
        kept |= {f"cache.{i}": cache[1:] for i, cache in enumerate(self.caches)}  # slot 0 is for padding
        kept = {name: x.clone() for name, x in kept.items()}
        for cache, old in zip(self.caches, before, strict=True):
            cache.copy_(old)
        return kept

    def _round(self, verified: RoundBatch, state: DraftState, of: DecodeRound | None = None) -> Any:
        """As `TreeWorker` runs it; verified: the batch of the target's forward."""
        of = of or self.round
        batch = verified if of.is_captured(verified) else verified.first(verified.b)
        drafts = of.draft(batch, state)
        output = of.verify(verified, drafts).first(batch.padded_b * batch.shape.width)
        if self.walks_eagerly:
            logits = output.logits[: batch.b * batch.shape.width]
            accepted = self.verifier.walk(batch, drafts.first(batch.b), logits)
        else:
            accepted = of.walk(batch, drafts, output)
        return drafts, output, accepted, of.extend(batch, accepted, output, state)

    def differing(self, seeds: range) -> set[str]:
        """Names of results in which a captured round differs from an eager one."""
        found = set()
        for seed in seeds:
            ours, eager = self.run(seed, True), self.run(seed, False)
            for name, x in eager.items():
                same = torch.allclose(x, ours[name], rtol=1e-4, atol=1e-4, equal_nan=True)
                if not same:
                    found.add(name)
        return found


def capture(case: Case, sizes: list[int] = SIZES) -> Case:
    case.round.capture(EmulatedCapturer(), SHAPE, SHAPES, sizes, GraphMemory())
    return case


@pytest.mark.parametrize("drafter", [Drafter, ParallelDrafter], ids=["levels one by one", "all levels at once"])
def test_every_captured_function_equals_eager(recorded: None, drafter: type[Drafter]) -> None:
    case = capture(Case(drafter=drafter))
    assert len(case.round.functions) == len(SIZES) * len(SHAPES) * 7  # draft, walk, extend twice and verify once
    assert not case.differing(range(1, 201))
    assert case.round.functions.replays == 4 * 200
    lengths = torch.cat([case.run(seed, True)["accepted.lengths"] for seed in range(1, 40)])
    assert lengths.max() > 1, "nothing was ever accepted"


def test_a_flat_and_a_deep_tree_of_one_width(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the captured forward of the target, and write other numbers of slots."""
    flat, deep = Shape(2, 3, 6), Shape(3, 4, 6)
    assert flat.reach < deep.reach < SHAPE.reach
    monkeypatch.setitem(globals(), "SHAPES", [flat, deep, SHAPE])
    case = capture(Case())
    assert not case.differing(range(1, 61))


def test_paths_of_fewer_requests_than_the_padded_batch(recorded: None) -> None:
    """The walk of a batch with transforms is of its requests; what the padding after them holds is of another shape."""
    case = capture(Case())
    case.walks_eagerly = True
    assert not case.differing(range(1, 61))


def test_a_batch_beyond_the_captured_sizes_runs_eagerly(recorded: None) -> None:
    case = capture(Case(), [1, 2])
    assert case.round.padded_b(2, SHAPE) == 2 and case.round.padded_b(5, SHAPE) == 5
    assert not case.differing(range(1, 9))
    assert 0 < case.round.functions.replays < 4 * 8


def test_a_small_batch_beside_a_rank_with_more_requests_than_were_captured(recorded: None) -> None:
    """Data-parallel attention: the target runs over as many rows as in the other rank, without graphs. The rest of the
    round must not replay the graphs of this rank's own size either, which read what a captured forward left."""
    case = capture(Case(), [1, 2, 4])
    assert not case.differing(range(1, 31)) and case.round.functions.replays > 0
    case.most_in_other_ranks = 6
    replays = case.round.functions.replays
    assert not case.differing(range(1, 61))
    assert case.round.functions.replays == replays


def test_batches_that_are_too_large_for_some_shapes(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of the caps are captured for up to 4 requests, plain rounds and narrow trees for 8; the rest runs eagerly,
    unpadded, and nothing differs."""
    monkeypatch.setattr(captured_rounds, "MAX_ROWS", 4 * SHAPE.width)
    case = capture(Case(), [2, 4, 8])
    assert case.round.padded_b(3, SHAPE) == 4 and case.round.padded_b(5, SHAPE) == 5
    assert case.round.padded_b(5, PLAIN) == case.round.padded_b(5, SHAPES[3]) == 8
    assert case.round.allowed(4) is None and case.round.allowed(5) == tuple(SHAPES[:-1])
    assert case.round._memory.logits(8, 8).shape == (64, V)
    assert not case.differing(range(1, 61))
    batches = [random_batch(seed) for seed in range(1, 61)]
    captured = [shape != SHAPE or len(schedule.seq_lens) <= 4 for schedule, _, shape in batches]
    assert case.round.functions.replays == 4 * sum(captured) and not all(captured)


class Sums:
    """Path sums of captured rounds, as a policy reads them a round later."""

    def __init__(self) -> None:
        self.case, self.chooser = Case(), ShapeChooser(SHAPE, Policy(SHAPE, CostModel(device(64)), SHAPES))
        self.case.round.capture(EmulatedCapturer(), SHAPE, SHAPES, SIZES, GraphMemory(), True)
        self.wanted: list[Tensor] = []

    def served(self, seeds: range) -> list[ServedRound]:
        """Rounds one after the other, with what the sums of each are without graphs in `wanted`."""
        served = []
        for seed in seeds:
            schedule, state, shape = random_batch(seed)
            b = len(schedule.seq_lens)
            batch = self.case.reader.read(shape, schedule, self.case.round.padded_b(b, shape))
            drafts, *_ = self.case._round(batch, state)
            real = drafts.first(b)
            replays = self.case.round.functions.replays
            one = self.chooser.launched(shape, b, 0, real, partial(self.case.round.path_sums, batch))
            assert self.case.round.functions.replays == replays + (one.sums is not None)
            if one.path_sums is not None:
                assert real.scores is not None
                self.wanted.append(one.path_sums(real.scores.clone()))
                served.append(one)
        return served


def test_captured_path_sums_are_those_of_eager_ones(recorded: None) -> None:
    """Every batch has another shape, so that all but plain ones tell their sums; the host reads them two rounds later,
    when the graphs have overwritten their memory."""
    sums = Sums()
    policy = sums.chooser.policy
    assert policy is not None
    sums.chooser._buffers = buffers_of(policy, SIZES[-1], "cpu")
    for first in range(1, 100, 3):
        sums.wanted.clear()
        for one, wanted in zip(sums.served(range(first, first + 3)), sums.wanted, strict=True):
            assert one.sums is not None
            torch.testing.assert_close(one.sums, wanted, rtol=1e-5, atol=1e-6)


def test_path_sums_in_the_memory_of_graphs_are_overwritten(recorded: None) -> None:
    """The control: without a copy the host reads what later replays left."""
    sums = Sums()
    served = sums.served(range(1, 7))
    pairs = zip((one.sums for one in served), sums.wanted, strict=True)
    assert any(found is not None and not torch.allclose(found, wanted) for found, wanted in pairs)


class Memo(Drafter):
    """A tensor of the first call is kept by Python."""

    kept: Tensor | None = None

    def extend(self, batch: RoundBatch, accepted: Accepted, path: AcceptedPath, hidden: Tensor) -> DraftState:
        state = super().extend(batch, accepted, path, hidden)
        own = tree_map_only(Tensor, torch.clone, state.roots)
        if self.kept is None or len(self.kept) != len(own):
            self.kept = own
        return state._replace(roots=self.kept + 0)


class Leftover(Drafter):
    """Memory of the graph is read before it is written."""

    def extend(self, batch: RoundBatch, accepted: Accepted, path: AcceptedPath, hidden: Tensor) -> DraftState:
        state = super().extend(batch, accepted, path, hidden)
        scratch = torch.empty_like(state.roots)
        return state._replace(roots=state.roots + (scratch > 2**50).long())


class Escaped(DecodeRound):
    """A function reads another one's inner memory, which the graph gives to others after its replay."""

    def _extend(self, batch: RoundBatch, accepted: Accepted, output: TargetOutput) -> Any:
        self.inner = output.features * 2
        return super()._extend(batch, accepted, output)

    def draft(self, batch: RoundBatch, state: DraftState) -> Drafts:
        drafts = super().draft(batch, state)
        if self.is_captured(batch):
            drafts.tree.tokens[:, 1:].sub_((self.inner[0, 0] > 1e30).long()).clamp_(min=0)
        return drafts


@pytest.mark.parametrize(
    ("drafter", "kind", "where"),
    [
        (Memo, DecodeRound, "state."),
        (Leftover, DecodeRound, "state."),
        (Drafter, Escaped, "tree.tokens"),
    ],
    ids=["a kept tensor", "memory that was never written", "inner memory of another graph"],
)
def test_a_planted_fault_is_found(recorded: None, drafter: Any, kind: Any, where: str) -> None:
    found = capture(Case(kind, drafter), [2, 8]).differing(range(1, 6 * len(SHAPES)))
    assert any(name.startswith(where) for name in found)


class Item(Drafter):
    """A value is read by the host."""

    def draft_tree(self, batch: RoundBatch, state: DraftState) -> Drafts:
        assert int(batch.prefix_lens.max()) > 0
        return super().draft_tree(batch, state)


class Masked(Drafter):
    """A shape depends on values."""

    def draft_tree(self, batch: RoundBatch, state: DraftState) -> Drafts:
        state.roots[state.roots > 5].sum()
        return super().draft_tree(batch, state)


@pytest.mark.parametrize("drafter", [Item, Masked])
def test_what_cuda_refuses_is_refused(recorded: None, drafter: Any) -> None:
    with pytest.raises(CaptureError):
        capture(Case(DecodeRound, drafter), [2])
