"""The decode round that both engines share, driven by a head whose answers are functions of the path to a node."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from draft_paths import Path, best_paths, paths_of
from torch import Tensor

from eagle_plugin.core.gumbel import gumbel_noise
from eagle_plugin.core.propose import SHARPNESS
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted, verify_greedy
from eagle_plugin.kernels.tree import topk_log_softmax
from eagle_plugin.runtime import rng
from eagle_plugin.runtime.accept import KVCaches, accept, accepted_rows
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, RecurrentLevels, TopM, draft, top_m_of

VOCABULARY = 11
SHAPES = [Shape(1, 4, 5), Shape(2, 4, 8), Shape(3, 2, 6), Shape(4, 3, 16), Shape.chain(3)]


def logits_after(request: int, path: Path) -> Tensor:
    """The head's logits [V] after a path of drafted tokens, different for every request and path."""
    gen = torch.Generator().manual_seed(hash((request, path)) % 2**31)
    return 2 * torch.randn(VOCABULARY, generator=gen)


class ToyHead:
    """A head whose hidden state is the number of the path that led to it; checks every row that it is asked for."""

    def __init__(self, lengths: Tensor, topk: int) -> None:
        self.lengths, self.topk = lengths, topk
        self.paths: list[tuple[int, Path]] = [(i, ()) for i in range(len(lengths))]  # by number
        self.slots: list[dict[Path, int]] = [{} for _ in lengths]  # of the nodes that were read

    def state(self, top_m: int) -> HeadState:
        logits = torch.stack([logits_after(i, ()) for i in range(len(self.lengths))])
        hidden = torch.arange(len(self.lengths), dtype=torch.float64)[:, None]
        return HeadState(TopM(*topk_log_softmax(logits, min(top_m, VOCABULARY))), hidden)

    def __call__(self, rows: LevelRows) -> tuple[Tensor, Tensor]:
        hidden, logits = [], []
        for row, number in enumerate(rows.hidden[:, 0].long().tolist()):
            i, parent = self.paths[number]
            path = (*parent, int(rows.tokens[row]))
            assert i == row // rows.nodes
            # A node of depth d is the head's row at position L + d - 1.
            assert int(rows.positions[row]) == int(self.lengths[i]) + len(path) - 1
            self.slots[i][path] = rows.first_slot + row % rows.nodes
            above = {self.slots[i][path[:depth]] for depth in range(1, len(path) + 1)}
            assert int(rows.ancestors.view(-1)[row]) == sum(1 << slot for slot in above)
            hidden.append([float(len(self.paths))])
            self.paths.append((i, path))
            logits.append(logits_after(i, path))
        assert rows.tail == rows.first_slot + rows.nodes
        return torch.stack(logits), torch.tensor(hidden, dtype=torch.float64)


def draft_with(head: ToyHead, shape: Shape, temperature: float = 0.0, chains: Tensor | None = None) -> Drafts:
    b = len(head.lengths)
    top_m = top_m_of(shape, temperature == 0)
    levels = RecurrentLevels(shape, head.state(top_m), head.lengths, top_m, head)
    keys = torch.arange(b) + 5 if temperature else None
    return draft(shape, torch.arange(b), levels, SamplingParams.of(b, temperature), keys, head.lengths, None, chains)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_trees_are_the_best_paths(shape: Shape) -> None:
    head = ToyHead(torch.tensor([7, 30, 2]), shape.topk)
    drafts = draft_with(head, shape)
    assert drafts.shape == shape and drafts.tree.tokens.shape == (3, shape.width)
    for i in range(3):
        paths = paths_of(drafts, i)
        assert int(drafts.tree.tokens[i, 0]) == i  # the root
        assert len(paths) == len(set(paths)) and set(paths) == best_paths(shape, partial(logits_after, i))


def test_sampled_trees_are_the_best_paths_with_the_noise_of_their_positions() -> None:
    """A child of a node at depth d has the noise of position L + d, whatever path leads there."""
    shape = Shape(2, 3, 8)
    head = ToyHead(torch.tensor([4, 9]), shape.topk)
    drafts = draft_with(head, shape, temperature=1.0)
    for i in range(2):

        def noised(path: tuple[int, ...], i: int = i) -> Tensor:
            logits = logits_after(i, path)
            key, place = torch.tensor([i + 5]), head.lengths[i : i + 1] + len(path)
            noise = gumbel_noise(key, place, torch.arange(len(logits))[None])[0]
            return (SHARPNESS * logits.double().log_softmax(0) + noise).float()

        assert set(paths_of(drafts, i)) == best_paths(shape, noised)


def test_requests_marked_as_chains_get_one_child_per_node() -> None:
    shape = Shape(3, 3, 8)
    drafts = draft_with(ToyHead(torch.tensor([4, 9]), shape.topk), shape, chains=torch.tensor([True, False]))
    chain: Path = ()
    for depth in range(1, 4):
        chain = (*chain, int(logits_after(0, chain).argmax()))
        assert chain in paths_of(drafts, 0), depth
    assert set(paths_of(drafts, 1)) == best_paths(shape, partial(logits_after, 1))


def target_logits(drafts: Drafts, seed: int) -> Tensor:
    b, width = drafts.tree.tokens.shape
    return 3 * torch.randn(b * width, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_requests_accept_what_the_greedy_walk_accepts(shape: Shape) -> None:
    lengths = torch.tensor([7, 30, 2])
    drafts = draft_with(ToyHead(lengths, shape.topk), shape)
    for seed in range(20):
        logits = target_logits(drafts, seed)
        found = accept(drafts, logits, SamplingParams.greedy(3), torch.arange(3), lengths, "joint")
        choices = logits.argmax(-1).view(3, -1)
        wanted = verify_greedy(drafts.tree.tokens, drafts.tree.parents, choices, shape.max_accept_length)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_the_shape_is_that_of_the_drafts() -> None:
    """Two rounds of one server may draft differently: what is accepted is as long as each round's own shape allows."""
    lengths = torch.tensor([7])
    for shape in (*SHAPES, PLAIN):
        drafts = Drafts.plain(torch.zeros(1)) if shape == PLAIN else draft_with(ToyHead(lengths, shape.topk), shape)
        accepted = accept(
            drafts, target_logits(drafts, 0), SamplingParams.greedy(1), torch.zeros(1).long(), lengths, "joint"
        )
        assert accepted.tokens.shape == (1, shape.max_accept_length)


@pytest.mark.parametrize("filters", ["joint", "chained"])
def test_a_request_accepts_the_same_in_any_batch(filters: str) -> None:
    """Keys and lengths decide over the random numbers: not the batch, not the order in it."""
    shape, lengths, keys = Shape(3, 3, 12), torch.tensor([7, 30, 2]), torch.tensor([3, 1, 4])
    drafts = draft_with(ToyHead(lengths, shape.topk), shape, temperature=1.0)
    logits = target_logits(drafts, 1).view(3, shape.width, -1)
    whole = accept(drafts, logits.view(-1, VOCABULARY), SamplingParams.of(3, 1.0), keys, lengths, filters)  # type: ignore[arg-type]
    for order in itertools.permutations(range(3), 2):
        index = torch.tensor(order)
        part = accept(
            drafts.take(index),
            logits[index].reshape(-1, VOCABULARY),
            SamplingParams.of(2, 1.0),
            keys[index],
            lengths[index],
            filters,  # type: ignore[arg-type]
        )
        assert all(torch.equal(x, y[index]) for x, y in zip(part, whole, strict=True))
    other = accept(drafts, logits.view(-1, VOCABULARY), SamplingParams.of(3, 1.0), keys, lengths + 1, filters)  # type: ignore[arg-type]
    assert not all(torch.equal(x, y) for x, y in zip(other, whole, strict=True))  # the control


def test_drafts_of_several_rounds_in_one_batch() -> None:
    """Narrow trees beside wide ones: each request accepts what it accepts alone."""
    lengths = torch.tensor([7, 30])
    wide, narrow = (draft_with(ToyHead(lengths, s.topk), s, 1.0) for s in (Shape(3, 3, 12), Shape(1, 2, 4)))
    plain = Drafts.plain(torch.tensor([8]))
    both = Drafts.concatenate([wide.take(torch.tensor([1])), narrow.take(torch.tensor([0])), plain])
    assert both.shape == Shape(3, 3, 12) and both.tree.tokens.shape == (3, 12)
    logits = target_logits(both, 2)
    keys, own = torch.tensor([1, 2, 3]), torch.tensor([30, 7, 5])
    together = accept(both, logits, SamplingParams.greedy(3), keys, own, "joint")
    parts = [(wide, 1), (narrow, 0), (plain, 0)]
    for i, (drafts, row) in enumerate(parts):
        alone = drafts.take(torch.tensor([row]))
        width = alone.shape.width
        rows = logits.view(3, 12, -1)[i, :width].reshape(width, -1)
        wanted = accept(alone, rows, SamplingParams.greedy(1), keys[i : i + 1], own[i : i + 1], "joint")
        n = int(wanted.lengths[0])
        assert int(together.lengths[i]) == n and torch.equal(together.tokens[i, :n], wanted.tokens[0, :n])


def test_a_tree_that_is_cut_accepts_no_node_that_is_gone() -> None:
    lengths = torch.tensor([7, 30])
    drafts = draft_with(ToyHead(lengths, 4), Shape(2, 4, 8))
    cut = drafts.truncate(torch.tensor([3, 8]))
    assert cut.tree.parents[0, 3:].tolist() == [-1] * 5 and torch.equal(cut.tree.tokens[1], drafts.tree.tokens[1])
    for seed in range(20):
        accepted = accept(cut, target_logits(cut, seed), SamplingParams.greedy(2), torch.arange(2), lengths, "joint")
        assert int(accepted.index[0].max()) < 3


def test_accepted_rows_and_the_move_of_their_keys() -> None:
    index = torch.tensor([[0, 2, 4], [0, 3, -1]], dtype=torch.int32)
    accepted = Accepted(index, torch.tensor([3, 2], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64))
    assert accepted_rows(accepted, 5).tolist() == [[0, 2, 4], [5, 8, 5]]
    cache = torch.arange(20.0)[:, None].repeat(1, 2)
    window = torch.tensor([[9, 1, 7, 3, 5], [10, 11, 12, 13, 14]])
    KVCaches(torch.tensor([cache.data_ptr()]), torch.tensor([8]), 20).move_accepted(window, accepted)
    moved = {9: 9, 1: 7, 7: 5, 3: 3, 5: 5, 10: 10, 11: 13, 12: 12, 13: 13, 14: 14}
    assert cache[:, 0].tolist() == [float(moved.get(slot, slot)) for slot in range(20)]


def test_keys_of_requests() -> None:
    keys = rng.request_keys(3, {1: 42, 2: 2**64 - 1})
    assert keys[1:].tolist() == [42, -1]
    assert len({int(rng.request_keys(1, {})[0]) for _ in range(20)}) == 20


def test_the_key_table_keeps_a_key_per_request() -> None:
    one, other, third = (rng.KeyTable(6, "cpu", seed) for seed in (5, 5, 6))
    for table in (one, other, third):
        table.draw(torch.tensor([4, 1]), {1: 42})
    rows = torch.tensor([1, 4])
    assert one.of(rows)[0] == 42 and torch.equal(one.of(rows), other.of(rows))
    assert one.of(rows)[1] != third.of(rows)[1]
    kept = one.of(rows)
    one.draw(torch.tensor([2]), {})
    assert torch.equal(one.of(rows), kept)  # other requests keep theirs
    one.draw(torch.tensor([4]), {})
    assert one.of(rows)[1] not in (kept[1], one.of(torch.tensor([2]))[0])  # the row's next request gets a new one
