"""Blocks in training equal what a decoder drafts, and are sampled whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_targets import block_states, dflash_head, random_documents
from training_runs import recipe, run_training

from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.heads.draft_head import Roots
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.layers import KeyValues
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.train.batches import Batch, weigh_chains
from eagle_plugin.learning.train.blocks import BlockPass, sample_blocks
from eagle_plugin.learning.train.logs import read_log
from eagle_plugin.learning.train.parallel import MaskedRows
from eagle_plugin.learning.train.recipe import TrainError

STEPS = 4  # of a block of 5 rows
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


def all_blocks(batch: Batch, causal: bool, steps: int = STEPS) -> MaskedRows:
    return sample_blocks(batch, weigh_chains(batch, steps, 0.0), 1.0, 0, causal, torch.Generator())


@torch.no_grad()
def states_of(head: DFlashHead, batch: Batch, rows: MaskedRows, steps: int = STEPS) -> dict[tuple[int, int], Tensor]:
    return block_states(head, batch, rows, steps)


@torch.no_grad()
def drafted(head: DFlashHead, ids: Tensor, aux: Tensor, anchor: int, steps: int = STEPS) -> Tensor:
    """The states [steps, H] of the levels after the token anchor + 1 of one text, which knows nothing after it."""
    root = torch.tensor([anchor + 1])
    context, past = head.read_text(ids[1 : anchor + 2], aux[: anchor + 1])
    layers = [KeyValues(*(part[None] for part in layer)) for layer in past]
    return head.list_levels(Roots(ids[root], root, context[-1:, None], layers), steps)[0]


def differences(head: DFlashHead, batch: Batch, rows: MaskedRows) -> list[float]:
    """By predicted row, how far training is from drafting."""
    states, found = states_of(head, batch, rows), []
    assert batch.aux is not None
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        for anchor in range(start, end - 1):
            if (anchor, 0) not in states:
                continue
            levels = drafted(head, batch.ids[start:end], batch.aux[start:end], anchor - start)
            for depth in range(1, STEPS + 1):
                if (anchor, depth) in states:
                    found.append(float((states[anchor, depth] - levels[depth - 1]).abs().max()))
    return found


@CAUSAL
@pytest.mark.parametrize("layers", [1, 3])
def test_equals_what_is_drafted(causal: bool, layers: int) -> None:
    head, batch = dflash_head(causal=causal, num_hidden_layers=layers), random_documents([(4, 7), (2, 9), (1, 2)])
    rows = all_blocks(batch, causal)
    found = differences(head, batch, rows)
    assert len(found) > 40 and max(found) < 2e-5
    head.causal = not causal
    wrong = states_of(head, batch, rows)  # the control: the other kind of block
    head.causal = causal
    states = states_of(head, batch, rows)
    assert min(float((states[a, 1] - wrong[a, 1]).abs().max()) for a, depth in states if depth == 2) > 1e-3


@pytest.mark.parametrize("fault", ["positions", "context", "mask"])
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, batch = dflash_head(num_hidden_layers=2), random_documents([(4, 7), (2, 9)])
    make = BlockPass.__init__

    def changed(self: BlockPass, *arguments: Any) -> None:
        make(self, *arguments)
        if fault == "positions":
            self.table.cos, self.table.sin = self.table.cos.roll(1, 0), self.table.sin.roll(1, 0)
        elif fault == "context":
            self.keys = [key.roll(1, 0) for key in self.keys]

    if fault == "mask":
        rows = all_blocks(batch, False)
        states = states_of(head, batch, rows)
        head.mask_token_id = 38
        other = states_of(head, batch, rows)
        assert min(float((other[place] - state).abs().max()) for place, state in states.items()) > 1e-3
        return
    monkeypatch.setattr(BlockPass, "__init__", changed)
    assert sorted(differences(head, batch, all_blocks(batch, False)))[5] > 1e-3


def test_levels_of_a_shorter_block_are_the_same_where_it_is_causal() -> None:
    batch = random_documents([(4, 12)])
    for causal in (True, False):
        head = dflash_head(block=3, causal=causal, num_hidden_layers=2)
        few, many = (states_of(head, batch, all_blocks(batch, causal, steps), steps) for steps in (2, 4))
        apart = max(float((state - many[place]).abs().max()) for place, state in few.items())
        assert apart < 2e-5 if causal else apart > 1e-2


@CAUSAL
def test_blocks_are_whole_and_of_rows_that_count(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    kept = possible = 0
    for trial in range(200):
        lengths = torch.randint(1, 12, (3, 2), generator=generator).tolist()
        batch = random_documents([(a, b) for a, b in lengths], seed=trial)
        batch.mask.copy_(torch.rand(len(batch), generator=generator) < 0.85)
        weights = weigh_chains(batch, STEPS, 0.0)
        rows = sample_blocks(batch, weights, 0.5, 0, causal, generator)
        chosen = rows.anchor[rows.depth == 0]
        assert chosen.equal(rows.anchor.unique()) and (weights[0, chosen] > 0).all()
        kept, possible = kept + len(chosen), possible + int((weights[0] > 0).sum())
        for anchor in chosen.tolist():
            counts = int((weights[:, anchor] > 0).sum()) if causal else STEPS
            assert rows.depth[rows.anchor == anchor].tolist() == list(range(counts + 1))
    assert 0.5 * possible <= kept < 0.6 * possible  # rounded up


@CAUSAL
def test_a_document_has_so_many_blocks_at_most(causal: bool) -> None:
    batch = random_documents([(2, 40), (3, 9), (1, 30)])
    weights, counts = weigh_chains(batch, STEPS, 0.0), torch.zeros(len(batch))

    def chosen(rate: float, most: int, seed: int) -> Tensor:
        rows = sample_blocks(batch, weights, rate, most, causal, torch.Generator().manual_seed(seed))
        return rows.anchor[rows.depth == 0]

    assert chosen(0.7, 40, 3).equal(chosen(0.7, 0, 3))  # a limit that no document reaches changes nothing
    possible = batch.document[weights[0] > 0].bincount()
    for seed in range(400):
        anchors = chosen(1.0, 10, seed)
        assert anchors.equal(anchors.unique()) and (weights[0, anchors] > 0).all()
        assert batch.document[anchors].bincount().equal(possible.clamp(max=10))
        counts[anchors] += 1
    share = counts[weights[0] > 0] / 400 * possible.clamp(min=10)[batch.document[weights[0] > 0]] / 10
    assert share[possible[batch.document[weights[0] > 0]] > 10].sub(1).abs().max() < 0.35  # each row as often


def test_a_recipe_makes_trains_and_continues_one(features: Any, tmp_path: Path) -> None:
    head = {"kind": "dflash", "mask_token_id": 2, "layers": 2}
    values = recipe(features.target, features.store, head=head, phases=[{"steps": 3}], budget={"updates": 12})
    run = run_training(tmp_path, "first", values)
    rows = read_log(run / "logs" / "val.csv")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    made = load_any_head(run / "head", features.target)
    assert (made.kind, made.block_size, made.causal, made.own_lm_head) == ("dflash", 4, False, None)
    values["head"] = {"from": str(run / "head")}
    values["budget"] = {"updates": 0}
    again = run_training(tmp_path, "again", values)
    for name in ("model.safetensors", "config.json"):
        assert (again / "head" / name).read_bytes() == (run / "head" / name).read_bytes()
    assert read_log(again / "logs" / "val.csv")[0]["loss"] == pytest.approx(rows[-1]["loss"], abs=1e-2)


@pytest.mark.parametrize(
    ("head", "others", "sentence"),
    [
        (
            {"block_size": 6},
            {},
            "has a block of 6 rows and a phase has 3 draft steps, wanted 5: all rows of a block see",
        ),
        (
            {"block_size": 3, "causal": True},
            {},
            "block of 3 rows and a phase has 3 draft steps, wanted at most 2; correct",
        ),
        ({"window": 40}, {}, "a head of kind dflash has no window; leave these keys out"),
        ({"norms": "3.0"}, {}, "a head of kind dflash has no norms; leave these keys out"),
        ({}, {"loss": {"noise": 0.1}}, r"loss\.noise is not for a head of kind dflash, which does not use it"),
        ({}, {"loss": {"keep_floor": 0.1}}, r"loss\.keep_floor is not for a head of kind dflash"),
        ({"kind": "eagle3", "causal": True}, {}, "a head of kind eagle3 has no causal; leave these keys out"),
        (
            {"kind": "auto", "block_size": 4},
            {},
            "a head of kind eagle3 drafts no blocks; leave block_size and causal out",
        ),
        ({"block_size": 1}, {}, r"head\.block_size"),
        ({"mask_token_id": 512}, {}, "mask_token_id is 512, wanted 0 to 511"),
        ({"mask_token_id": 20}, {}, "holds token 20, which the head uses as its mask"),
    ],
)
def test_what_does_not_apply_is_refused(
    head: dict[str, Any], others: dict[str, Any], sentence: str, features: Any, tmp_path: Path
) -> None:
    shape = {"kind": "dflash", "mask_token_id": 2} | head
    if shape["kind"] != "dflash":
        del shape["mask_token_id"]
    values = recipe(features.target, features.store, head=shape, phases=[{"steps": 3}], **others)
    with pytest.raises((TrainError, HeadError), match=sentence):
        run_training(tmp_path, "refused", values)
