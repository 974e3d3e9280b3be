"""The options of the plugin inside vLLM: what they choose, and what each refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.vllm.options import OptionError, Options


def read(**options: Any) -> Options:
    return Options.read({"eagle_plugin": options})


@pytest.mark.parametrize("given", [{}, {"another_plugin": {"depth": 9}}, None, {"eagle_plugin": {}}])
def test_nothing_given(given: Any) -> None:
    assert Options.read(given) == Options(None, None, None)


@pytest.mark.parametrize("engines", [False, True])
def test_asynchronous_scheduling_is_vllms_choice_where_the_user_makes_none(engines: bool) -> None:
    assert Options().beside(engines).async_scheduling is engines
    for given in (False, True):
        assert Options(async_scheduling=given).beside(engines).async_scheduling is given


def test_all_given() -> None:
    assert read(depth=3, topk=2, async_scheduling=True) == Options(3, 2, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2, 4], r"eagle_plugin is \[2, 4\], wanted an object such as"),
        ({"width": 3, "topK": 2}, r"unknown topK, width; known are async_scheduling, depth, topk"),
        ({"depth": 0}, r"depth is 0, wanted a whole number from 1 on"),
        ({"depth": True}, r"depth is True, wanted a whole number"),
        ({"topk": 2.0}, r"topk is 2\.0, wanted a whole number"),
        ({"topk": "4"}, r"topk is '4', wanted a whole number"),
        ({"async_scheduling": 1}, r"async_scheduling is 1, wanted true or false"),
    ],
)
def test_bad_options(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Options.read({"eagle_plugin": given})
    assert "--additional-config" in str(caught.value)


@pytest.mark.parametrize("draft_tokens", range(1, MAX_WIDTH))
def test_every_number_of_draft_tokens_has_a_shape(draft_tokens: int) -> None:
    """The levels after the first fit into one slot per drafted token, and the tree uses all that it may."""
    depth, topk, width = Options().shape(draft_tokens)
    assert width == draft_tokens + 1 and depth >= 1 and topk >= 1
    assert (depth - 1) * topk <= draft_tokens
    most = sum(topk**level for level in range(1, depth + 1))
    assert most >= draft_tokens or depth == 1 or topk == 4


def test_given_options_are_taken() -> None:
    assert Options(depth=7, topk=1).shape(7) == (7, 1, 8)
    assert Options(depth=3).shape(6) == (3, 3, 7)  # six tokens leave three slots to each of two levels
    assert Options(topk=3).shape(7) == (2, 3, 8)


@pytest.mark.parametrize("levels", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("draft_tokens", range(1, MAX_WIDTH))
def test_trees_of_one_forward_are_as_deep_as_the_head_drafts_well(draft_tokens: int, levels: int) -> None:
    """One masked row per level, and all levels in one bitmask of 64."""
    shape = Options().shape(draft_tokens, levels)
    assert shape.width == draft_tokens + 1
    assert shape.steps == min(draft_tokens, levels, 16) and shape.topk == min(draft_tokens, 4)
    assert shape.draft_slots <= MAX_WIDTH


def test_given_levels_of_one_forward() -> None:
    assert Options(depth=6, topk=4).shape(7, 3) == (6, 4, 8)  # 20 slots for one level after the other
    with pytest.raises(OptionError, match="depth 9 needs as many drafted tokens .* num_speculative_tokens 7: raise it"):
        Options(depth=9, topk=2).shape(7, 9)
    with pytest.raises(OptionError, match=r"depth 10 and topk 8 make \(depth - 1\) \* topk 72, wanted at most 64"):
        Options(depth=10, topk=8).shape(31, 9)
    assert Options().shape(15, 9).within_steps(2) == (2, 4, 16)
    assert Options().shape(15, 9).within_steps(None) == (9, 4, 16)
    assert Options().shape(15, 9).within_steps(1) == (1, 4, 5)


def test_too_many_nodes() -> None:
    with pytest.raises(OptionError, match=r"num_speculative_tokens is 64, .* at most 63 drafted tokens: lower it"):
        Options().shape(MAX_WIDTH)


@pytest.mark.parametrize("levels", [None, 9])
def test_levels_that_do_not_fit(levels: int | None) -> None:
    with pytest.raises(OptionError, match="depth 9 needs as many drafted tokens .* num_speculative_tokens 7: raise it"):
        Options(depth=9).shape(7, levels)
    with pytest.raises(OptionError, match=r"depth 17 and topk 5 make \(depth - 1\) \* topk 80, wanted at most 64"):
        Options(depth=17, topk=5).shape(31, levels)


def test_trees_may_need_more_slots_than_drafted_tokens() -> None:
    assert Options(depth=3, topk=4).shape(7) == (3, 4, 8)
    assert Options(depth=7, topk=4).shape(7) == (7, 4, 8)
