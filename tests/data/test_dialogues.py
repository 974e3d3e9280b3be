"""Turns of one dialogue become one document, on which the same is learnt as on one document per turn."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_targets import ToyDocument
from training_runs import extract_features

from eagle_plugin.learning.data.dialogues import DialogueRow, answers_of, join_turns, read_dialogues, response_mask
from eagle_plugin.learning.data.rows import TokenRow, format_row, prompt_id_of
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.train.batches import pack, weigh_chains
from eagle_plugin.learning.train.row_list import RowList

LONG = 1000


def turn(number: int, prompt: list[int], response: list[int], name: str = "chat", split: str = "train") -> TokenRow:
    return TokenRow(f"{name}#{number}", "s", prompt, response, "stop", split)  # type: ignore[arg-type]


def dialogue(name: str, turns: int, seed: int) -> list[TokenRow]:
    rng, context, rows = random.Random(seed), list[int](), list[TokenRow]()
    for number in range(turns):
        context = context + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 9))]
        response = [rng.randrange(3, 500) for _ in range(rng.randrange(2, 12))]
        rows.append(turn(number, context, response, name))
        context = context + response
    return rows


def test_turns_that_begin_with_those_before_are_joined() -> None:
    first, second, third = dialogue("chat", 3, 0)
    (found,) = join_turns([first, second, third], LONG)
    assert isinstance(found, DialogueRow) and found.id == "chat#2" and found.response_ids == third.response_ids
    assert found.prompt_ids == third.prompt_ids
    ids = found.prompt_ids + found.response_ids
    answers = [first.response_ids, second.response_ids, third.response_ids]
    assert [ids[begin:end] for begin, end in answers_of(found)] == answers
    assert response_mask(answers_of(found), len(ids)).sum() == sum(map(len, answers))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"prompt_ids": [9, 9, 4, 4, 7, 8]}, id="a template that drops the reasoning of earlier turns"),
        pytest.param({"id": "other#1"}, id="another dialogue"),
        pytest.param({"source": "t"}, id="another source"),
        pytest.param({"split": "val"}, id="another split"),
        pytest.param({"prompt_ids": [9, 5, 6, 7]}, id="no token between two answers"),
        pytest.param({"id": "chat#0"}, id="the same turn twice"),
    ],
)
def test_others_stay_as_they_are(change) -> None:
    first, second = turn(0, [9], [5, 6, 7]), turn(1, [9, 5, 6, 7, 8], [4, 4])
    assert len(list(join_turns([first, second], LONG))) == 1, "the control"
    changed = [first, replace(second, **change)]
    assert list(join_turns(changed, LONG)) == changed


def test_a_turn_whose_answer_is_beyond_the_limit_takes_no_other_with_it() -> None:
    first, second = turn(0, [9], [5, 6, 7]), turn(1, [9, 5, 6, 7, 8], [4, 4, 4])
    assert len(list(join_turns([first, second], 7))) == 1  # two tokens of its answer are left
    assert list(join_turns([first, second], 6)) == [first, second]


def positions(rows: list[TokenRow], steps: int = 4) -> set[tuple[str, int, int]]:
    """(dialogue, token, draft step) of everything that is learnt from."""
    found = set()
    for row in rows:
        n = len(row.prompt_ids) + len(row.response_ids)
        ids, mask = torch.tensor(row.prompt_ids + row.response_ids), response_mask(answers_of(row), n)
        weights = weigh_chains(pack([ToyDocument(ids, mask, None, torch.zeros(n, 1))]), steps, 0.0)
        places = [(prompt_id_of(row.id), t, k) for k, t in weights.nonzero().tolist()]
        assert not found & set(places), "learnt from twice"
        found |= set(places)
    return found


def test_the_same_is_learnt_from_fewer_tokens() -> None:
    rows = [row for number in range(20) for row in dialogue(f"chat-{number}", 1 + number % 5, number)]
    joined = list(join_turns(rows, LONG))
    assert len(joined) == 20 and positions(joined) == positions(rows)
    length = lambda some: sum(len(row.prompt_ids) + len(row.response_ids) for row in some)  # noqa: E731
    assert length(joined) < 0.55 * length(rows)
    last = [TokenRow(row.id, row.source, row.prompt_ids, row.response_ids, row.finish) for row in joined]
    assert len(positions(last)) < 0.6 * len(positions(rows)), "the answers of earlier turns are not looked at"


def test_their_states_are_those_of_one_document_per_turn(tiny_target: Path, tmp_path: Path) -> None:
    rows = [row for number in range(3) for row in dialogue(f"chat-{number}", 3, number)]
    file, apart = tmp_path / "rows.jsonl", tmp_path / "apart.jsonl"
    file.write_text("".join(map(format_row, rows)))
    apart.write_text("".join(format_row(replace(row, id=row.id.replace("#", "-"))) for row in rows))
    stores = [FeatureStore(extract_features(one, tiny_target, tmp_path / one.stem)) for one in (file, apart)]
    joined, single = ({entry.id: store.read(entry) for entry in store.entries} for store in stores)
    assert len(joined) == 3 and len(single) == 9
    for row in rows:
        one, whole = single[row.id.replace("#", "-")], joined[f"{prompt_id_of(row.id)}#2"]
        n, begin = len(one.ids), len(row.prompt_ids)
        assert torch.equal(whole.ids[:n], one.ids) and bool(whole.mask[begin:n].all()) and not whole.mask[begin - 1]
        assert whole.aux is not None and one.aux is not None
        torch.testing.assert_close(whole.aux[:n], one.aux, atol=0.02, rtol=0.02)
        torch.testing.assert_close(whole.last[:n], one.last, atol=0.02, rtol=0.02)
    found = RowList([file], 512, LONG)
    assert [row.mask().tolist() for row in found.rows] == [joined[row.id].mask.tolist() for row in found.rows]
    marked = sum(entry.n_response for entry in stores[0].entries)
    assert found.count()["s"]["response_tokens"] == marked == sum(len(row.response_ids) for row in rows)
    assert [row.id for row in read_dialogues(file, LONG)] == [row.id for row in found.rows]
