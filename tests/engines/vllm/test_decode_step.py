"""The functions of a decode step, captured by the graph emulator and replayed on other batches, equal eager ones.

Two of our runners serve the same requests, one with graphs. In every step some requests are missing, in any order, so
that batches are padded to a captured size and trees wait for a later step. Faults that a capture hides are planted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_world import device
from torch import Tensor
from vllm_sampling_metadata import sampling_metadata
from vllm_toy import BLOCK, BLOCKS_EACH, DRAFT_V, REQUESTS, SHAPE, H, Head, ToyRunner, V

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.chooser import ShapeChooser, buffers_of
from eagle_plugin.policy.costs import CostModel
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime import captured_rounds
from eagle_plugin.runtime.graph_emulator import CaptureError, EmulatedCapturer, recording_launches
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.runtime.round import Drafts, HeadState, TopM
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.head_forwards import DraftBatch, PathBatch
from eagle_plugin.vllm.masked_rows import HeadRows
from eagle_plugin.vllm.shapes import RoundShapes
from eagle_plugin.vllm.step_memory import StepMemory

SIZES = [1, 2, 4, 8]
STEPS = 6
SHAPES = captured_shapes(SHAPE)


@pytest.fixture(scope="module", autouse=True)
def recorded() -> Iterator[None]:
    """Launches of native kernels are seen by captures."""
    with recording_launches():
        yield


def metadata(b: int, greedy: bool) -> SimpleNamespace:
    return sampling_metadata() if greedy else sampling_metadata(torch.full((b,), 0.9), top_p=torch.full((b,), 0.95))


class Case:
    """Requests in a runner with graphs, and the same in one without."""

    def __init__(
        self,
        head: type[Head] = Head,
        step: type[DecodeStep] = DecodeStep,
        sizes: list[int] = SIZES,
        eager: type[Head] = Head,
        shapes: Sequence[Shape] = (SHAPE,),
        others: Sequence[Shape] = (),
    ) -> None:
        """shapes: captured ones, of which steps draft any; others: the same, without graphs."""
        self.captured, self.eager = ToyRunner(head(), step), ToyRunner(eager(), None)
        made = self.captured.runner._step
        assert made is not None
        self.graphs = made
        made.capture(EmulatedCapturer(), [PLAIN, *shapes], sizes, GraphMemory())
        self.drawn = [*shapes, *others]
        self.lengths: list[int] = []  # that were accepted

    def differing(self, seeds: range) -> set[str]:
        """What differs in a step of any of these seeds."""
        return {name for seed in seeds for name in self._serve(seed)}

    def _serve(self, seed: int) -> set[str]:
        g, greedy = torch.Generator().manual_seed(seed), seed % 2 == 0
        b = int(torch.randint(1, REQUESTS + 1, (), generator=g))
        lengths = torch.randint(2, BLOCK * BLOCKS_EACH - 2 * SHAPE.reach - 4 * STEPS, (b,), generator=g)
        logp = torch.randn(b, DRAFT_V, generator=g).log_softmax(1).sort(descending=True).values
        tokens = torch.stack([torch.randperm(DRAFT_V, generator=g) for _ in range(b)])
        m = SHAPE.topk if greedy else DRAFT_V
        top = TopM(logp[:, :m].contiguous(), tokens[:, :m].contiguous())
        state, roots = HeadState(top, torch.randn(b, H, generator=g)), torch.randint(0, V, (b,), generator=g)
        self.captured.head.cache.copy_(self.eager.head.cache)  # what was written after a request's tokens may differ
        self.captured.cache.copy_(self.eager.cache)
        for runner in (self.captured, self.eager):
            runner.start(lengths, state, roots, metadata(b, greedy))
        for _ in range(STEPS):
            some = torch.randperm(b, generator=g)[: int(torch.randint(1, b + 1, (), generator=g))].tolist()
            tree, widths = self.eager.drafts(some).tree, self.eager.widths(some)
            logits = [torch.randn(width, V, generator=g) for width in widths]
            for i, width in enumerate(widths):  # the target likes what was drafted
                for node in range(1, width):
                    logits[i][max(int(tree.parents[i, node]), 0), tree.tokens[i, node]] += 4
            features = torch.randn(sum(widths), 3 * H, generator=g)
            shape = self.drawn[int(torch.randint(0, len(self.drawn), (), generator=g))]
            found = []
            for runner in (self.captured, self.eager):
                torch.manual_seed(seed)
                runner.runner._shapes.choose = lambda *_, shape=shape: shape  # type: ignore[method-assign]
                found.append(runner.step(some, torch.cat(logits), features, metadata(len(some), greedy)))
            ours, wanted = found
            self.lengths += wanted["accepted.lengths"].tolist()
            different = {name for name, x in wanted.items() if not same(ours[name], x)}
            if different:
                return different
        return set()


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


class Narrow(Head):
    """A head that is compiled for twelve rows: three requests of a level."""

    max_num_tokens = 12
    most = 0  # rows of one forward so far

    def _one_forward(self, rows: HeadRows) -> Any:
        if rows.metadata.rows.extend is None:  # a step's own rows are no more than that, but for this test
            self.most = max(self.most, len(rows.tokens))
        return super()._one_forward(rows)


def test_more_rows_than_the_head_is_compiled_for_are_read_in_slices() -> None:
    """As eight requests draft four nodes per level; whether it is captured or not, nothing changes."""
    made = Case(head=Narrow)
    assert made.differing(range(8)) == set() and made.captured.head.most == 12
    assert made.eager.head.max_num_tokens > REQUESTS * SHAPE.topk
    narrow, eager = Case(), ToyRunner(Narrow(), None)
    narrow.eager = eager
    assert narrow.differing(range(8)) == set() and eager.head.most == 12


def test_every_captured_function_equals_eager() -> None:
    case = Case()
    assert len(case.graphs.functions) == len(SIZES) * 2 * 3
    assert not case.differing(range(60))
    assert case.graphs.functions.replays == 60 * (1 + 3 * STEPS)
    assert max(case.lengths) > 2 and min(case.lengths) == 1


def test_steps_of_several_shapes() -> None:
    """Each step drafts another one, captured or not; requests that missed a step verify an older one than others."""
    shapes = SHAPES[1:]
    case = Case(shapes=shapes, others=[Shape(2, 3, 6)])
    assert len(case.graphs.functions) == len(SIZES) * 2 * 3 * len(shapes)
    assert not case.differing(range(40))
    assert 40 < case.graphs.functions.replays < 40 * (1 + 3 * STEPS)
    assert max(case.lengths) > 2 and min(case.lengths) == 1


def test_steps_of_batches_that_are_too_large_for_some_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of the caps are captured for up to 2 requests, narrow ones for 8, in memory of no more rows."""
    monkeypatch.setattr(captured_rounds, "MAX_ROWS", 2 * SHAPE.width)
    narrow = Shape(1, 2, 3)
    case = Case(shapes=[narrow, SHAPE])
    assert [case.graphs.shapes_at(size) for size in (2, 4)] == [(PLAIN, narrow, SHAPE), (PLAIN, narrow)]
    assert len(case.graphs.functions) == 2 * 3 * (2 + len(SIZES))
    memory = case.graphs._memory
    assert memory.logits(8, 3).shape == (24, V) and len(memory._flat["features"]) == 2 * SHAPE.width * 3 * H
    assert not case.differing(range(40))
    assert 40 < case.graphs.functions.replays < 40 * (1 + 3 * STEPS)


class Parallel(Head):
    """A P-EAGLE head, which lists all levels as it reads the accepted tokens."""

    levels = HeadLevels(MaskRow(3, torch.randn(1, H, generator=torch.Generator().manual_seed(4))))


class Misplaced(Parallel):
    """Its masked rows have another place in the text than those of an eager step."""

    def extend_paths(self, batch: PathBatch, *rest: Any) -> HeadState:
        return super().extend_paths(batch._replace(last=batch.last - batch.last % SHAPE.max_accept_length), *rest)


def test_captured_path_sums_are_those_of_eager_ones() -> None:
    case, found = Case(), []
    case.graphs.capture(EmulatedCapturer(), SHAPES, SIZES, GraphMemory(), with_sums=True)
    for one in (case.captured, case.eager):
        policy = Policy(SHAPE, CostModel(device(64)), case.graphs.shapes)
        chooser, sums = ShapeChooser(SHAPE, policy, buffers=buffers_of(policy, REQUESTS, "cpu")), list[Tensor]()

        def launched(*given: Any, call: Any = chooser.launched, sums: list[Tensor] = sums) -> ServedRound:
            served: ServedRound = call(*given)
            sums += [] if served.sums is None else [served.sums.clone()]
            return served

        chooser.launched = launched  # type: ignore[method-assign]
        one.runner._shapes = RoundShapes(chooser)
        found.append(sums)
    assert not case.differing(range(1, 13))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert len(found[0]) > 12


def test_levels_that_the_head_lists_as_it_reads() -> None:
    """Eager steps read the paths as consecutive tokens, without spare places; captured ones as trees, with them."""
    case = Case(Parallel, eager=Parallel)
    assert not case.differing(range(60))
    assert case.graphs.functions.replays == 60 * 3 * STEPS  # the first trees have a forward of their own
    assert max(case.lengths) > 2 and min(case.lengths) == 1
    assert Case(Misplaced, eager=Parallel).differing(range(12))


def test_levels_of_several_shapes() -> None:
    """A narrower tree takes a part of what the head listed for the caps."""
    assert not Case(Parallel, eager=Parallel, shapes=SHAPES[1:], others=[Shape(2, 3, 6)]).differing(range(40))


def test_a_batch_beyond_the_captured_sizes_runs_eagerly() -> None:
    case = Case(sizes=[1, 2])
    assert not case.differing(range(12))
    assert 0 < case.graphs.functions.replays < 12 * (1 + 3 * STEPS)


def test_the_size_of_the_padded_batch() -> None:
    """Plain steps of this runner have no function of ours."""
    step = Case(sizes=[1, 4]).graphs
    assert [step.padded_b(b, SHAPE) for b in (1, 3, 5)] == [1, 4, 5]
    assert [step.padded_b(b, PLAIN) for b in (1, 3, 5)] == [1, 3, 5]


class Memo(Head):
    """A tensor of the first call is kept by Python."""

    kept: Tensor | None = None

    def extend_paths(self, batch: PathBatch, features: Tensor, *rest: Any) -> HeadState:
        state = super().extend_paths(batch, features, *rest)
        if self.kept is None or len(self.kept) != len(state.hidden):
            self.kept = state.hidden.clone()
        return state._replace(hidden=self.kept + 0)


class Leftover(Head):
    """Memory of the graph is read before it is written."""

    def extend_paths(self, *arguments: Any) -> HeadState:
        state = super().extend_paths(*arguments)
        return state._replace(hidden=state.hidden + torch.empty_like(state.hidden).clamp(max=9))


class Stale(DecodeStep):
    """A number of the host is that of the capture."""

    longest = 0

    def begin(self, batch: RoundBatch, layers: Any) -> None:
        self.longest = max(batch.host_lens)
        super().begin(batch, layers)

    def _walk(self, padded_b: int, shape: Shape, is_greedy: bool) -> tuple[Accepted, Tensor]:
        accepted, tokens = super()._walk(padded_b, shape, is_greedy)
        return accepted, tokens + (1 - min(self.longest, 1))


class Escaped(DecodeStep):
    """A function reads another one's inner memory, which the graph gives to others after its replay."""

    def _walk(self, padded_b: int, shape: Shape, is_greedy: bool) -> tuple[Accepted, Tensor]:
        self.inner = self._memory.view("prefix_lens", padded_b) * 1
        return super()._walk(padded_b, shape, is_greedy)

    def _extend(self, padded_b: int, shape: Shape, is_greedy: bool) -> None:
        super()._extend(padded_b, shape, is_greedy)
        self._memory.root(padded_b, is_greedy).state.hidden.add_((self.inner > 2**40)[:, None].float())


@pytest.mark.parametrize(
    ("head", "step", "where"),
    [
        (Memo, DecodeStep, "tree."),
        (Leftover, DecodeStep, "tree."),
        (Head, Stale, "sampled"),
        (Head, Escaped, "tree."),
    ],
    ids=["a kept tensor", "memory that was never written", "a number of the host", "inner memory of another graph"],
)
def test_a_planted_fault_is_found(head: Any, step: Any, where: str) -> None:
    found = Case(head, step, [2, 8]).differing(range(6))
    assert any(name.startswith(where) for name in found)


def test_padding_writes_into_nobodys_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what clears it, it has the places of requests that were there before."""

    def put_table(self: StepMemory, layer: str, slots: Tensor, b: int, padded_b: int) -> None:
        self.table(layer, padded_b)[:b, : slots.shape[1]] = slots

    monkeypatch.setattr(StepMemory, "put_table", put_table)
    assert {"head's cache"} <= Case().differing(range(30))


def test_trees_that_wait_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a request that missed a step verifies what was drafted for another one."""
    monkeypatch.setattr(DraftStore, "keep_own", lambda _: None)
    assert Case().differing(range(6))


class Item(Head):
    """A value is read by the host."""

    def draft_tree(self, batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        assert int(batch.lengths.max()) > 0
        return super().draft_tree(batch, roots, state)


class Masked(Head):
    """A shape depends on values."""

    def draft_tree(self, batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        roots[roots > 5].sum()
        return super().draft_tree(batch, roots, state)


@pytest.mark.parametrize("head", [Item, Masked])
def test_what_cuda_refuses_is_refused(head: Any) -> None:
    with pytest.raises(CaptureError):
        Case(head, sizes=[2])
