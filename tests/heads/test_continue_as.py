"""A P-EAGLE head that starts from a trained EAGLE-3 head: what it takes, what is new, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trained_heads import run, trained_head

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.create import continue_as
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.peagle import PEagleHead

IDS = torch.arange(10, 138)
TOKENS = torch.arange(20, 32)


def eagle3(target: Path, **options: Any) -> DraftHead:
    return trained_head("eagle3", target, draft_ids=IDS, aux_layers=(1, 4, 6), **options)


def first_drafts(head: DraftHead) -> torch.Tensor:
    features = torch.randn(len(TOKENS), head.fc.in_features, generator=torch.Generator().manual_seed(5))
    return run(head, TOKENS, features)[1]


@pytest.mark.parametrize("norms", ["3.0", "3.1"])
@pytest.mark.parametrize("layers", [None, 4])
def test_its_first_draft_is_that_of_the_eagle3_head(tiny_target: Path, layers: int | None, norms: Any) -> None:
    start = eagle3(tiny_target, norms=norms)
    head = continue_as("peagle", start, tiny_target, layers=layers, mask_token_id=3)
    assert isinstance(head, PEagleHead) and len(head.layers) == (layers or 1) and head.mask_token_id == 3
    assert torch.equal(first_drafts(head), first_drafts(start))
    old, new = dict(start.named_parameters()), dict(head.named_parameters())
    assert all(torch.equal(new[name], old[name]) for name in old)
    later = tuple(f"layers.{i}." for i in range(1, layers or 1))
    assert {name for name in new.keys() - old.keys() if not name.startswith(later)} == {"mask_hidden"}
    assert 0 < head.mask_hidden.std() < 0.03
    assert all(parameter.requires_grad for parameter in new.values())
    if layers:  # a new layer has a gradient where it is zero, and passes on what it is given until it moves
        first_drafts_with_grad(head)
        moved = new["layers.2.mlp.down_proj.weight"]
        assert not moved.any() and moved.grad is not None and moved.grad.any()
        with torch.no_grad():
            moved.add_(0.1)
        assert not torch.equal(first_drafts(head), first_drafts(start))


def first_drafts_with_grad(head: DraftHead) -> None:
    features = torch.randn(len(TOKENS), head.fc.in_features, generator=torch.Generator().manual_seed(5))
    visible = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    state, _ = head(head.embed(TOKENS), head.fuse(features), torch.arange(len(TOKENS)), visible)
    head.logits(state).square().sum().backward()


def test_it_is_exported_and_read_as_a_peagle_head(tiny_target: Path, tmp_path: Path) -> None:
    save_head(eagle3(tiny_target), tmp_path / "eagle3", target_dir=tiny_target)
    start = load_any_head(tmp_path / "eagle3", tiny_target, torch.float32)
    head = continue_as("peagle", start, tiny_target, layers=2, mask_token_id=3)
    save_head(head, tmp_path / "peagle", target_dir=tiny_target)
    assert check_head(tiny_target, tmp_path / "peagle", algorithm="EAGLE3").kind == "peagle"
    again = load_any_head(tmp_path / "peagle", tiny_target, torch.float32)
    torch.testing.assert_close(first_drafts(again), first_drafts(start), atol=0.05, rtol=0.05)  # stored in bfloat16
    assert again.mask_token_id == 3 and len(again.layers) == 2


def test_the_mask_token_is_outside_the_draft_vocabulary(tiny_target: Path) -> None:
    with pytest.raises(HeadError, match="mask_token_id is 512, wanted 0 to 511"):
        continue_as("peagle", eagle3(tiny_target), tiny_target, mask_token_id=512)


@pytest.mark.parametrize(("start", "kind"), [("eagle2", "peagle"), ("peagle", "peagle"), ("eagle3", "eagle2")])
def test_other_kinds_are_refused(tiny_target: Path, start: str, kind: str) -> None:
    head = trained_head(start, tiny_target, mask_token_id=3)
    with pytest.raises(HeadError, match=f"a head of kind {kind} cannot start from one of kind {start}"):
        continue_as(kind, head, tiny_target)


def test_fewer_layers_are_refused(tiny_target: Path) -> None:
    head = eagle3(tiny_target)
    twice = continue_as("peagle", head, tiny_target, layers=2, mask_token_id=3)
    assert len(twice.layers) == 2
    with pytest.raises(HeadError, match="the head has 1 layers and 0 are wanted; name 1 or more"):
        continue_as("peagle", head, tiny_target, layers=0, mask_token_id=3)
