"""A round's batch: which query and logits rows are the nodes of which tree, whatever the scheduler put together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.batch import DraftStore, RoundBatch

PARENTS = [-1, 0, 0, 1, 2]
WIDTH = len(PARENTS)
SHAPE = Shape(2, 2, WIDTH)


def drafts(names: list[str], parents: list[int] = PARENTS) -> Drafts:
    """Trees whose tokens tell the request and the node."""
    b, width = len(names), len(parents)
    tokens = torch.tensor([[ord(name) * 100 + node for node in range(width)] for name in names])
    depths, ancestors = [0] * width, [1] * width
    for node in range(1, width):
        parent = max(parents[node], 0)
        depths[node] = depths[parent] + 1 if parents[node] >= 0 else 0
        ancestors[node] = ancestors[parent] | 1 << node
    tree = DraftTree(
        tokens,
        torch.tensor(parents, dtype=torch.int32).repeat(b, 1),
        torch.tensor(depths, dtype=torch.int32).repeat(b, 1),
        torch.tensor(ancestors).repeat(b, 1),
    )
    return Drafts(tree, SHAPE._replace(width=width))


def plan(names: str, scheduled: list[int], lens: list[int], prefix: list[int], store: DraftStore) -> RoundBatch:
    return RoundBatch.read(np.array(scheduled), np.array(lens), list(names), torch.tensor(prefix), store)


def store_of(*batches: Drafts | list[str]) -> DraftStore:
    store = DraftStore()
    for batch in batches:
        found = drafts(batch) if isinstance(batch, list) else batch
        store.put([chr(int(row[0]) // 100) for row in found.tree.tokens], found)
    return store


def tokens_of(batch: RoundBatch) -> list[list[int]]:
    return batch.drafts.tree.tokens.tolist()


def named(names: str, width: int = WIDTH) -> list[list[int]]:
    return [[ord(name) * 100 + node for node in range(width)] for name in names]


def same(found: Tensor | None, wanted: list) -> bool:
    return found is not None and found.tolist() == wanted


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def test_a_uniform_batch() -> None:
    batch = plan("ab", [4, 4], [5, 5], [10, 20], store_of(["a", "b"]))
    assert batch.uniform and batch.width == WIDTH and tokens_of(batch) == named("ab")
    assert same(batch.trees, [0, 1]) and same(batch.others, [])
    assert same(batch.query, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]) and batch.logits_rows is None
    extend, tree, query, _ = batch.rows()
    assert extend is None and tree is not None and query is None
    assert same(tree.requests, [0, 1]) and same(tree.prefix_lens, [10, 20]) and tree.tail == WIDTH
    assert torch.equal(tree.ancestors, batch.drafts.tree.ancestors)


def test_a_mixed_batch() -> None:
    """A tree, a prefill, a plain decode and a tree: nodes keep the rows that the scheduler gave the requests."""
    batch = plan("abcd", [4, 0, 0, 4], [5, 7, 1, 5], [10, 0, 30, 40], store_of(["a", "d"]))
    assert not batch.uniform and tokens_of(batch) == named("ad")
    assert same(batch.trees, [0, 3]) and same(batch.others, [1, 2])
    assert same(batch.starts, [0, 5, 12, 13]) and same(batch.lens, [5, 7, 1, 5])
    assert same(batch.query, [[0, 1, 2, 3, 4], [13, 14, 15, 16, 17]])
    # vLLM computes logits for 5 + 1 + 1 + 5 rows; a request without drafts has one.
    assert same(batch.logits_rows, [[0, 1, 2, 3, 4], [5] * 5, [6] * 5, [7, 8, 9, 10, 11]])
    extend, tree, query, _ = batch.rows()
    assert extend is not None and tree is not None
    assert same(extend.requests, [1, 2]) and same(extend.seq_lens, [7, 31])
    assert same(extend.lens, [7, 1]) and same(extend.starts, [5, 12])
    assert same(query, [0, 1, 2, 3, 4, 13, 14, 15, 16, 17]) and same(tree.prefix_lens, [10, 40])


def test_a_batch_without_trees() -> None:
    batch = plan("ab", [0, 0], [6, 1], [0, 9], store_of(["c"]))
    assert batch.width == 1 and same(batch.trees, []) and same(batch.others, [0, 1])
    assert batch.logits_rows is None and not batch.uniform
    extend, tree, query, _ = batch.rows()
    assert tree is None and extend is not None and same(extend.seq_lens, [6, 10])


def test_a_tree_cut_by_the_scheduler() -> None:
    """Of the second tree the root and two nodes are scheduled: its last nodes are padding on its last row."""
    batch = plan("ab", [4, 2], [5, 3], [10, 20], store_of(["a", "b"]))
    assert not batch.uniform
    assert same(batch.query, [[0, 1, 2, 3, 4], [5, 6, 7, 7, 7]])
    assert same(batch.logits_rows, [[0, 1, 2, 3, 4], [5, 6, 7, 7, 7]])
    assert batch.drafts.tree.parents.tolist() == [PARENTS, [-1, 0, 0, -1, -1]]
    assert batch.drafts.tree.depths.tolist() == [[0, 1, 1, 2, 2], [0, 1, 1, 0, 0]]
    assert batch.drafts.tree.ancestors[1].tolist() == [0b1, 0b11, 0b101, 0b1001, 0b10001]
    attending = batch.rows().tree  # equal rows of queries must attend to equal keys
    assert attending is not None and attending.ancestors[1].tolist() == [0b1, 0b11, 0b101, 0b101, 0b101]


def test_all_trees_cut_alike() -> None:
    """A narrower tree is a tree of its own, not one with padding."""
    batch = plan("ab", [2, 2], [3, 3], [10, 20], store_of(["a", "b"]))
    assert batch.uniform and batch.width == 3 and tokens_of(batch) == named("ab", 3)
    assert batch.drafts.tree.parents.tolist() == [[-1, 0, 0]] * 2 and batch.logits_rows is None


# ---------------------------------------------------------------------------------------------------------------------
# Which trees


def test_requests_in_another_order() -> None:
    assert tokens_of(plan("cab", [4] * 3, [5] * 3, [1, 2, 3], store_of(["a", "b", "c"]))) == named("cab")


def test_requests_that_left_the_batch() -> None:
    assert tokens_of(plan("ca", [4] * 2, [5] * 2, [1, 2], store_of(["a", "b", "c"]))) == named("ca")


def test_trees_of_two_draftings() -> None:
    """A request that was left out for a step comes back."""
    batch = plan("ba", [4, 4], [5, 5], [1, 2], store_of(["a"], ["b"]))
    assert tokens_of(batch) == named("ba")


def test_scheduled_drafts_without_a_tree() -> None:
    """Past the drafter's reach vLLM schedules zeros: only the root may be taken from them; others keep theirs."""
    batch = plan("ab", [4, 4], [5, 5], [10, 20], store_of(["a"]))
    assert tokens_of(batch)[0] == named("a")[0] and batch.drafts.tree.parents[0].tolist() == [-1, 0, 0, 1, 2]
    assert batch.drafts.tree.parents[1].tolist() == [-1] * WIDTH
    assert batch.drafts.tree.depths[1].tolist() == [0] * WIDTH
    assert batch.drafts.tree.ancestors[1].tolist() == [1 << node | 1 for node in range(WIDTH)]
    assert batch.uniform


def test_more_scheduled_than_drafted() -> None:
    batch = plan("a", [6], [7], [10], store_of(["a"]))
    assert batch.width == 7 and batch.drafts.tree.parents.tolist() == [[*PARENTS, -1, -1]]


def test_trees_of_different_widths() -> None:
    """Two requests of the last step, and one that was left out of it and has a wider tree."""
    narrow = drafts(["b", "c"], parents=[-1, 0, 1])._replace(shape=Shape(3, 1, 3))
    batch = plan("bac", [2, 4, 2], [3, 5, 3], [1, 2, 3], store_of(["a"], narrow))
    assert batch.drafts.shape == Shape(3, 2, WIDTH) and not batch.uniform
    tree = batch.drafts.tree
    b, c = ([ord(name) * 100 + node for node in (0, 1, 2, 0, 0)] for name in "bc")
    assert tree.tokens.tolist() == [b, named("a")[0], c]
    assert tree.parents.tolist() == [[-1, 0, 1, -1, -1], PARENTS, [-1, 0, 1, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 0, 0], [0, 1, 1, 2, 2], [0, 1, 2, 0, 0]]
    assert same(batch.query, [[0, 1, 2, 2, 2], [3, 4, 5, 6, 7], [8, 9, 10, 10, 10]])
    assert same(batch.logits_rows, batch.query.tolist())
    attending = batch.rows().tree  # equal rows of queries must attend to equal keys
    assert attending is not None and attending.ancestors[0].tolist() == [0b1, 0b11, 0b111, 0b111, 0b111]
    assert batch.newest == [0, 2]


def test_a_new_request_whose_step_is_filled_up() -> None:
    """vLLM schedules as many rows for it as the widest trees have, beside narrower trees, which stay what they are."""
    batch = plan("ab", [2, 4], [3, 5], [10, 20], store_of(drafts(["a"], parents=[-1, 0, 0])))
    assert batch.drafts.tree.parents.tolist() == [[-1, 0, 0, -1, -1], [-1] * WIDTH]
    assert same(batch.query, [[0, 1, 2, 2, 2], [3, 4, 5, 6, 7]]) and batch.newest == [0]


def test_plain_drafts_replace_trees() -> None:
    """A tree that was drafted and not scheduled must not come back after a plain round."""
    store = store_of(["a", "b"])
    store.put(["a"], Drafts.plain(torch.tensor([7])))
    batch = plan("ab", [0, 4], [1, 5], [10, 20], store)
    assert batch.newest == [0] and tokens_of(batch) == named("b")
    assert store.take(["a"]) is None


def test_which_requests_verify_what_was_drafted_last() -> None:
    """Not those with rows of a prompt, a cut tree, an older drafting, or none; and every drafting counts once."""
    store = store_of(["a"], ["b", "c", "d"])
    batch = plan("abcde", [4, 4, 2, 0, 0], [5, 5, 3, 1, 1], [1] * 5, store)
    assert batch.newest == [1]
    assert plan("bc", [4, 4], [5, 5], [2, 2], store).newest == []
    store.put(["a", "b"], Drafts.plain(torch.tensor([1, 2])))
    assert plan("abc", [0, 0, 0], [1, 7, 1], [3] * 3, store).newest == [0]


def test_a_tree_serves_once() -> None:
    """Trees of a batch before the last must not come back: their root is an older token."""
    store = store_of(["a"])
    plan("a", [4], [5], [10], store)
    assert plan("a", [4], [5], [12], store).drafts.tree.parents.tolist() == [[-1] * WIDTH]


def test_newer_trees_replace_older_ones_and_finished_requests_are_forgotten() -> None:
    store = store_of(["a", "b"])
    newer = drafts(["a"])
    newer.tree.tokens[:] += 50
    store.put(["a"], newer)
    store.forget(["b", "unknown"])
    assert store.take(["b"]) is None
    found = store.take(["a"])
    assert found is not None and found.tree.tokens.tolist() == (torch.tensor(named("a")) + 50).tolist()
