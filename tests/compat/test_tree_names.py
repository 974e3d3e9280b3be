"""Tree building and greedy verification under sgl_kernel's names, against slow Python."""

import pytest
import sgl_kernel
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("path")
QLEN_ONLY = 1


@st.composite
def candidate_tables(draw):
    """What SGLang's draft loop hands over for one request: parent_list, the selected candidates and all parents."""
    topk, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    parent_list = [-1, *range(topk)]  # group 0 hangs from the root, group 1 + c from candidate c of level 1
    parent_of = {c: -1 for c in range(topk)}
    frontier = list(range(topk))
    for step in range(1, steps):
        first = topk + topk * topk * (step - 1)
        children = {first + j * topk + i: parent for j, parent in enumerate(frontier) for i in range(topk)}
        parent_of |= children
        frontier = sorted(draw(st.permutations(sorted(children)))[:topk])
        if step < steps - 1:
            parent_list += frontier
    if steps == 1:
        parent_list = []
    chosen: set[int] = set()
    for c in draw(st.lists(st.sampled_from(sorted(parent_of)), max_size=12)):
        while c != -1:
            chosen.add(c)
            c = parent_of[c]
    return topk, steps, parent_list, sorted(chosen), parent_of


def path_of(candidate: int, parent_of: dict[int, int]) -> list[int]:
    return [] if candidate == -1 else [*path_of(parent_of[candidate], parent_of), candidate]


def build(tables, seq_lens):
    topk, steps = tables[0][0], tables[0][1]
    b, width = len(tables), len(tables[0][3]) + 1
    mask, positions = torch.full((b * width * width,), True), torch.empty(b * width, dtype=torch.int64)
    links = torch.full((3, b, width), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([t[2] for t in tables], dtype=torch.int64),
        torch.tensor([t[3] for t in tables], dtype=torch.int64),
        torch.tensor(seq_lens),
        mask,
        positions,
        *links,
        topk,
        steps,
        width,
        QLEN_ONLY,
    )
    return mask.view(b, width, width), positions.view(b, width), *links


def children_of(node: int, first, following) -> list[int]:
    found, child = [], int(first[node])
    while child >= 0:
        found.append(child)
        child = int(following[child])
    return found


@settings(deadline=None, max_examples=200)
@given(candidate_tables(), st.integers(1, 3), st.integers(0, 1000))
def test_tree_of_selected_candidates(table, b, length):
    _, _, _, chosen, parent_of = table
    mask, positions, index, first, following = build([table] * b, [length + i for i in range(b)])
    width = len(chosen) + 1
    node_of = {-1: 0, **{c: node for node, c in enumerate(chosen, start=1)}}
    for i in range(b):
        assert index[i].tolist() == list(range(i * width, (i + 1) * width))
        for candidate, node in node_of.items():
            path = path_of(candidate, parent_of)
            assert torch.nonzero(mask[i, node]).flatten().tolist() == [0, *[node_of[c] for c in path]]
            assert positions[i, node] == length + i + len(path)
            children = [node_of[c] for c in chosen if parent_of[c] == candidate]
            assert children_of(node, first[i], following[i]) == children


def test_a_node_without_its_parent_is_unreachable():
    # candidate 2 is the child of candidate 0, which was not chosen
    table = (2, 2, [-1, 0, 1], [1, 2], None)
    mask, positions, _, first, following = build([table], [10])
    assert children_of(0, first[0], following[0]) == [1]
    assert mask[0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert positions[0].tolist() == [10, 11, 11]


@settings(deadline=None, max_examples=200)
@given(candidate_tables(), st.integers(1, 3), st.integers(1, 5), st.data())
def test_greedy_walk_follows_the_target(table, b, max_accept_length, data):
    _, _, _, chosen, parent_of = table
    _, _, index, first, following = build([table] * b, [5] * b)
    width = len(chosen) + 1
    small = st.integers(0, 2)  # few tokens: equal siblings and long walks both occur
    tokens = torch.tensor([[data.draw(small) for _ in range(width)] for _ in range(b)])
    targets = torch.tensor([[data.draw(small) for _ in range(width)] for _ in range(b)])
    predicts = torch.full((b * width,), -7, dtype=torch.int32)
    accepted = torch.full((b, max_accept_length), -1, dtype=torch.int32)
    drafts = torch.full((b,), -7, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=drafts,
        candidates=tokens,
        retrive_index=index,
        retrive_next_token=first,
        retrive_next_sibling=following,
        target_predict=targets,
    )
    candidates = [-1, *chosen]
    for i in range(b):
        walk = [0]
        while len(walk) < max_accept_length:
            here = candidates[walk[-1]]
            good = [
                n for n in range(1, width) if parent_of[candidates[n]] == here and tokens[i, n] == targets[i, walk[-1]]
            ]
            if not good:
                break
            walk.append(good[0])
        assert drafts[i] == len(walk) - 1
        assert accepted[i].tolist() == [i * width + n for n in walk] + [-1] * (max_accept_length - len(walk))
        row = predicts.view(b, width)[i]
        assert [int(row[n]) for n in walk] == [int(targets[i, n]) for n in walk]
        assert all(row[n] == -7 for n in range(width) if n not in walk)


def test_other_mask_modes_are_refused():
    links = torch.full((3, 1, 2), -1)
    with pytest.raises(NotImplementedError, match="tree mask mode is 0, wanted QLEN_ONLY"):
        sgl_kernel.build_tree_kernel_efficient_cpu(
            torch.zeros(1, 0, dtype=torch.int64),
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([3]),
            torch.ones(1 * 2 * 5, dtype=torch.bool),
            torch.zeros(2, dtype=torch.int64),
            *links,
            1,
            1,
            2,
            0,
        )
