"""Looked-up branches: what is found, where it goes in the tree, its score, and whose text it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import prop
from lookup_cases import PRIOR, copy_of, history_of, lengths_of, random_table, random_text
from torch import Tensor

from eagle_plugin.core import lookup
from eagle_plugin.core.lookup import BELOW, BEST, CELLS, LENGTHS, MAX_MATCH, MIN_MATCH, UNLISTED, UNREAD, TokenHistory
from eagle_plugin.core.tree import CandidateTable, new_table, select_tree
from eagle_plugin.core.verify import Accepted


def cell(kind: int, length_class: int) -> int:
    return kind * len(LENGTHS) + length_class


def table_of(rows: list[tuple[int, int, float]], more: int) -> tuple[CandidateTable, int]:
    """One request's candidates: token, parent and score of each."""
    table = new_table(1, len(rows) + more)
    for i, (token, parent, score) in enumerate(rows):
        table.tokens[0, i], table.parents[0, i], table.scores[0, i] = token, parent, score
    return table, len(rows)


def look_up(history: TokenHistory, table: CandidateTable, candidates: int, sequences: list[list[int]]) -> None:
    lengths = lengths_of(sequences)
    roots = torch.tensor([text[-1] for text in sequences])
    lookup.look_up(history, table, candidates, 64, 1 + torch.arange(len(sequences)), lengths, roots)


def accepted_of(*tokens: int) -> Accepted:
    path = torch.tensor([tokens])
    return Accepted(torch.zeros_like(path).int(), torch.tensor([len(tokens)], dtype=torch.int32), path)


def found_by_hand(text: list[int]) -> tuple[int, int]:
    """The longest earlier occurrence of the text's end and its length; the newest of several."""
    best = (0, -1)
    for at in range(len(text) - 1):
        length = 0
        while (
            length < min(MAX_MATCH, at + 1)
            and text[at - length] >= 0
            and text[at - length] == text[len(text) - 1 - length]
        ):
            length += 1
        best = max(best, (length, at))
    return best if best[0] >= MIN_MATCH else (0, -1)


@prop
@given(st.integers(0, 2**31), st.integers(1, 70), st.integers(1, 4), st.sampled_from([2, 7, 40, 100]))
def test_the_longest_and_newest_occurrence_is_found(seed: int, length: int, alphabet: int, window: int) -> None:
    text = random_text(torch.Generator().manual_seed(seed), length, alphabet)
    history = history_of([text], window, 3)
    at, matched = lookup.longest_match(history, torch.tensor([1]), torch.tensor([length - 1]))
    begin = max(length - window, 0)
    wanted_length, wanted = found_by_hand(text[begin:])
    assert int(matched) == wanted_length
    if wanted_length:
        assert int(at) == begin + wanted


def test_a_path_that_reaches_the_root_repeats_itself() -> None:
    history = history_of([[9, 1, 2, 1, 2, 1, 2]], 32, 5)
    tokens, count, matched = lookup.copied_path(history, torch.tensor([1]), torch.tensor([6]), 5)
    assert tokens.tolist() == [[1, 2, 1, 2, 1]] and count.tolist() == [5] and matched.tolist() == [4]


def test_a_path_ends_before_what_is_no_token() -> None:
    text = [1, 2, 3, -1, 4, 1, 2]
    history = history_of([text], 32, 5)
    tokens, count, _ = lookup.copied_path(history, torch.tensor([1]), torch.tensor([6]), 5)
    assert count.tolist() == [1] and tokens.tolist() == [[3, 0, 0, 0, 0]]


# What is merged: the properties that a tree needs, and that a broken merge violates.


def faults_of(table: CandidateTable, history: TokenHistory, sequences: list[list[int]]) -> list[str]:
    """What is wrong with tables after a lookup."""
    found = []
    for i, text in enumerate(sequences):
        scores, tokens, parents = (values[i].tolist() for values in table)
        alive = [c for c, score in enumerate(scores) if score > -math.inf]
        siblings = [(parents[c], tokens[c]) for c in alive]
        if len(set(siblings)) < len(siblings):
            found.append("two siblings are equal")
        if any(parents[c] >= c or (parents[c] >= 0 and scores[parents[c]] < scores[c]) for c in alive):
            found.append("a child is better than its parent, or comes before it")
        length, at = found_by_hand(text)
        path = [text[at + 1 + j % (len(text) - 1 - at)] for j in range(history.path.shape[1])] if length else []
        if -1 in path:
            path = path[: path.index(-1)]
        node = -1
        for token in path:
            children = [c for c in alive if parents[c] == node and tokens[c] == token]
            if not children:
                found.append("the path is not in the table")
                break
            node = children[0]
    return found


def random_case(seed: int, b: int, steps: int) -> tuple[TokenHistory, CandidateTable, int, list[list[int]]]:
    gen = torch.Generator().manual_seed(seed)
    sequences = [random_text(gen, int(torch.randint(2, 50, (), generator=gen)), 4) for _ in range(b)]
    for text in sequences:
        text[-1] = max(text[-1], 0)
    table, candidates = random_table(gen, b, steps, 3, 4, steps)
    return history_of(sequences, 64, steps), table, candidates, sequences


@prop
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 5))
def test_the_path_is_in_a_sound_table(seed: int, b: int, steps: int) -> None:
    history, table, candidates, sequences = random_case(seed, b, steps)
    look_up(history, table, candidates, sequences)
    assert faults_of(table, history, sequences) == []


def without_sharing(table: CandidateTable, candidates: int) -> None:
    table.tokens[:, candidates] = table.tokens[:, 0]
    table.parents[:, candidates] = -1
    table.scores[:, candidates] = table.scores[:, 0]


def with_a_wrong_parent(table: CandidateTable, candidates: int) -> None:
    added = (table.scores[:, candidates:] > -torch.inf) & (table.parents[:, candidates:] >= 0)
    table.parents[:, candidates:] = torch.where(added, table.parents[:, candidates:] - 1, -1)


def with_too_good_a_step(table: CandidateTable, candidates: int) -> None:
    table.scores[:, candidates:] = torch.where(table.scores[:, candidates:] > -torch.inf, 0.5, -torch.inf)


@pytest.mark.parametrize("fault", [without_sharing, with_a_wrong_parent, with_too_good_a_step])
def test_a_broken_merge_is_seen(fault: Any) -> None:
    found = []
    for seed in range(20):
        history, table, candidates, sequences = random_case(seed, 3, 3)
        look_up(history, table, candidates, sequences)
        fault(table, candidates)
        found += faults_of(table, history, sequences)
    assert found


# Whose text it is.


@prop
@given(st.integers(0, 2**31))
def test_nothing_but_the_requests_own_text_counts(seed: int) -> None:
    """Not that of other rows, and not what an earlier request left in the same row, before or after the text."""
    gen = torch.Generator().manual_seed(seed)
    history, table, candidates, sequences = random_case(seed, 2, 3)
    other = copy_of(history)
    for row, text in enumerate(sequences, start=1):
        stale = torch.randint(0, 4, (64,), generator=gen).int()
        for position in range(len(text)):
            stale[position % 64] = text[position]
        other.tokens[row] = stale
    wanted = CandidateTable(*(values.clone() for values in table))
    look_up(history, table, candidates, sequences)
    look_up(other, wanted, candidates, sequences)
    assert all(torch.equal(x, y) for x, y in zip(table, wanted, strict=True))


def test_a_text_that_begins_too_early_would_be_seen() -> None:
    """The control: what an earlier request left is found where a row does not know where its text begins."""
    history = history_of([[5, 6, 7, 8, 5, 6]], 32, 2)
    for begins, wanted in ((0, 2), (4, 0)):
        history.begins[1] = begins
        assert int(lookup.longest_match(history, torch.tensor([1]), torch.tensor([5]))[1]) == wanted


def test_tokens_that_do_not_follow_what_is_known_begin_a_text() -> None:
    history, row = history_of([[5, 6, 7, 8]], 32, 2), torch.tensor([1])
    lookup.put_tokens(history, row, torch.tensor([4]), torch.tensor([[9, 9]]), torch.tensor([1]))
    assert (int(history.begins[1]), int(history.ends[1])) == (0, 4)
    lookup.put_tokens(history, row, torch.tensor([3]), torch.tensor([[9]]), torch.tensor([1]))  # back by two
    assert (int(history.begins[1]), int(history.ends[1])) == (0, 3) and history.tokens[1, :4].tolist() == [5, 6, 7, 9]
    lookup.put_tokens(history, row, torch.tensor([9]), torch.tensor([[1, 2]]), torch.tensor([2]))  # some are missing
    assert (int(history.begins[1]), int(history.ends[1])) == (9, 10)


# What its score is.


def test_a_step_that_the_head_lists_is_raised_and_its_siblings_are_lowered() -> None:
    text = [1, 2, 3, 4, 1, 2]  # 3, 4 follow
    q = (0.5, 0.3)
    rows = [(7, -1, math.log(q[0])), (3, -1, math.log(q[1])), (8, 1, math.log(q[1] * 0.6)), (9, 0, math.log(0.1))]
    history = history_of([text], 32, 2)
    table, candidates = table_of(rows, 2)
    look_up(history, table, candidates, [text])
    first, second = float(PRIOR[cell(BELOW, 0)]), float(PRIOR[cell(UNLISTED, 1)])
    p = 1 - first * (1 - q[1])
    p_second = p * (1 - second)
    wanted = [first * q[0], p, p * 0.6 * second, 0.1 * first, 0.0, p_second]
    assert table.scores.exp()[0].tolist() == pytest.approx(wanted)
    assert table.tokens[0, candidates:].tolist() == [0, 4] and table.parents[0, candidates:].tolist() == [-1, 1]
    assert history.cells[1:].tolist() == [[cell(BELOW, 0), cell(UNLISTED, 1)]]
    assert history.doubts[1].tolist() == pytest.approx([1 - q[1], 1])
    tree = select_tree(table, torch.tensor([2]), 4)
    assert tree.tokens.tolist() == [[2, 7, 3, 4]] or tree.tokens.tolist() == [[2, 7, 3, 8]]


def test_what_the_head_says_of_a_step_names_its_cell() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    rows = [(3, -1, math.log(0.6)), (7, -1, math.log(0.3)), (9, 0, math.log(0.2))]
    history = history_of([text], 32, 3)
    table, candidates = table_of(rows, 3)
    look_up(history, table, candidates, [text])
    assert history.cells[1:].tolist() == [[cell(BEST, 0), cell(UNLISTED, 1), cell(UNREAD, 1)]]
    assert table.parents[0, candidates:].tolist() == [-1, 0, candidates + 1]


def test_without_a_match_nothing_changes() -> None:
    rows = [(3, -1, math.log(0.6)), (7, -1, math.log(0.3))]
    table, candidates = table_of(rows, 2)
    history = history_of([[1, 2, 3]], 32, 2)
    look_up(history, table, candidates, [[1, 2, 3]])
    assert torch.equal(table.scores[0, :2], torch.tensor([math.log(0.6), math.log(0.3)]))
    assert table.scores[0, 2:].tolist() == [-math.inf] * 2 and int(history.starts[1]) == -1


def test_misses_and_what_was_expected_of_them_are_counted() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    history = history_of([text], 32, 3)
    table, candidates = table_of([(3, -1, math.log(0.6)), (7, -1, math.log(0.3))], 3)
    look_up(history, table, candidates, [text])
    cells = history.cells[1].tolist()
    assert int(history.taken[1]) == 3
    lookup.append_tokens(history, torch.tensor([1]), torch.tensor([6]), accepted_of(3, 4, 9))
    wanted = torch.zeros(CELLS)
    wanted[cells[0]] += 0.4
    for late in cells[1:]:
        wanted[late] += 1
    torch.testing.assert_close(history.expected[1], wanted)
    assert history.missed[1].nonzero()[:, 0].tolist() == [cells[2]] and float(history.missed.sum()) == 1
    assert history.counts[1].tolist() == [2, 1]  # 3 is the head's; 4 was accepted, 5 was not
    assert history.tokens[1, 6:10].tolist() == [2, 3, 4, 9] and int(history.ends[1]) == 9
    again = copy_of(history)
    lookup.append_tokens(again, torch.tensor([1]), torch.tensor([9]), accepted_of(4))  # no lookup came before
    assert torch.equal(again.expected, history.expected) and torch.equal(again.counts, history.counts)


def test_a_step_where_the_head_lists_nothing_is_counted() -> None:
    history = history_of([[1, 2, 3, 4, 1, 2]], 32, 2)
    table, candidates = table_of([(0, -1, -math.inf)], 2)
    look_up(history, table, candidates, [[1, 2, 3, 4, 1, 2]])
    assert history.cells[1].tolist()[0] == cell(UNREAD, 0) == 0
    lookup.append_tokens(history, torch.tensor([1]), torch.tensor([5]), accepted_of(8))
    assert (float(history.expected[1, 0]), float(history.missed[1, 0])) == (1, 1)


def test_the_path_alone_is_a_chain_of_the_steps_that_were_taken() -> None:
    histories = [[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6]]
    history, rows = history_of(histories, 32, 3), torch.tensor([1, 2])
    table = new_table(2, 4)
    look_up(history, table, 1, histories)
    found = lookup.path_trees(history, rows, torch.tensor([2, 6]), 5)
    assert found.tokens.tolist() == [[2, 3, 4, 1, 2], [6] * 5]
    assert found.parents.tolist() == [[-1, 0, 1, 2, -1], [-1] * 5]
    assert found.depths.tolist() == [[0, 1, 2, 3, 0], [0] * 5]


def test_a_path_of_another_round_counts_for_nothing() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    history = history_of([text], 32, 3)
    table, candidates = table_of([(3, -1, -1.0)], 3)
    look_up(history, table, candidates, [text])
    lookup.append_tokens(history, torch.tensor([1]), torch.tensor([7]), accepted_of(3, 4))
    assert not history.expected.any() and not history.counts.any()


def test_a_request_teaches_its_own_lookups() -> None:
    """After many misses the score of a step is low, after many hits high; the sums stay small."""

    def last_score(is_right: bool) -> float:
        text = [1, 2, 3, 4, 1, 2]
        history, row, length = history_of([text], 32, 1), torch.tensor([1]), torch.tensor([5])
        for _ in range(100):
            history.begins[1], history.ends[1] = 0, 5
            table, candidates = table_of([(7, -1, math.log(0.3))], 1)
            look_up(history, table, candidates, [text])
            lookup.append_tokens(history, row, length, accepted_of(3 if is_right else 8))
        assert float(history.expected.max()) <= lookup.MOST_EXPECTED
        look_up(history, table, candidates, [text])
        return float(table.scores[0, candidates].exp())

    assert last_score(True) > 0.8 and last_score(False) < 0.1
    assert 0.1 < 1 - PRIOR[cell(UNLISTED, 0)] < 0.8  # where both began


def test_nobodys_row_gets_no_branches_and_keeps_no_trace() -> None:
    history, text = history_of([], 16, 2), [5, 6, 5, 6]
    before = copy_of(history)
    for _ in range(2):
        for position in range(4):
            table, candidates = table_of([(3, -1, -1.0)], 2)
            place = torch.tensor([position])
            lookup.look_up(history, table, candidates, 4, torch.tensor([0]), place, torch.tensor([text[position]]))
            assert table.scores[0].tolist() == [-1.0, -math.inf, -math.inf]
            lookup.append_tokens(history, torch.tensor([0]), place, accepted_of(5, 6))
    assert all(torch.equal(x, y) for x, y in zip(history, before, strict=True))
    tree = select_tree(table, torch.tensor([0]), 4)  # more nodes than candidates: impossible ones fill it
    assert tree.parents[0].tolist() == [-1, 0, 0, 0]


def test_the_sums_of_siblings_stay_probabilities() -> None:
    history, table, candidates, sequences = random_case(3, 3, 4)
    look_up(history, table, candidates, sequences)
    assert all(total <= 1 + 1e-5 for total in sums_of_siblings(table))


def sums_of_siblings(table: CandidateTable) -> list[float]:
    """Of the children of each node, the probability after it."""
    sums: dict[tuple[int, int], float] = {}
    scores: Tensor = table.scores
    for i in range(len(scores)):
        for c in range(scores.shape[1]):
            parent = int(table.parents[i, c])
            above = 0.0 if parent < 0 else float(scores[i, parent])
            if above > -math.inf:
                sums[i, parent] = sums.get((i, parent), 0.0) + math.exp(float(scores[i, c]) - above)
    return list(sums.values())
