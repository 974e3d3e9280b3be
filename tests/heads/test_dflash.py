"""DFlash heads: what is made, stored, read again and refused, and that they compute what vLLM's class computes.

`dflash_reference` is an implementation of its own from the files; tests/engines/vllm compares the engine with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import tiny_dflash
from dflash_reference import DFlashReference
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from trained_heads import rewrite, trained_head
from transformers import AutoModelForCausalLM

from eagle_plugin.cli import main
from eagle_plugin.heads.block_drafter import describe_block
from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.mask_token import mask_token_candidates
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.learning.reference.draft import DraftTail, prefill_head
from eagle_plugin.learning.reference.target import target_features

IDS = torch.arange(10, 138)
MADE: dict[str, dict[str, Any]] = {
    "the target's lm_head": {"layers": 2},
    "a draft vocabulary": {"layers": 1, "draft_ids": IDS},
    "causal": {"layers": 2, "causal": True, "block_size": 5, "aux_layers": (1, 4, 6)},
}
TEXT = [3 + 7 * i % 400 for i in range(24)]


def make(target: Path, **options: Any) -> DraftHead:
    return trained_head("dflash", target, mask_token_id=2, **options)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("dflash") / "target", head_dim=32)


@torch.no_grad()
def difference(target: Path, folder: Path, change: Callable[[DFlashHead], object] = lambda head: None) -> float:
    """The largest difference of logits between our module and the reference, over all levels after some tokens.

    change: does something to our module first.
    """
    reference, head = DFlashReference(target, folder), load_any_head(folder, target)
    assert isinstance(head, DFlashHead)
    change(head)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prefill, apart = prefill_head(head, TEXT, target_features(model, head, TEXT)), 0.0
    for root in (1, 9, 23):
        tail = DraftTail(head, prefill, torch.tensor([root]), head.block_size - 1)
        assert tail.levels is not None
        wanted = reference.logits(TEXT[: root + 1], head.block_size)
        apart = max(apart, float((head.logits(tail.levels[0]) - wanted).abs().max()))
    return apart


def test_computes_what_the_reference_computes(target: Path, tmp_path: Path) -> None:
    head = tiny_dflash(tmp_path / "head", target, block=8)
    assert difference(target, head) < 1e-4
    made = tmp_path / "made"
    save_head(make(target, layers=2, draft_ids=IDS), made, target_dir=target, dtype=torch.float32)
    assert difference(target, made) < 1e-4
    causal = rewrite(head, tmp_path / "causal", lambda c: c | {"is_causal": True})
    assert difference(target, causal) < 1e-4
    for fault in FAULTS:
        assert difference(target, head, fault) > 0.1, fault


def other_block(head: DFlashHead) -> None:
    head.causal = True


def other_mask(head: DFlashHead) -> None:
    head.mask_token_id = 3


def no_context_norm(head: DFlashHead) -> None:
    head.hidden_norm.weight.data.fill_(1)


FAULTS = (other_block, other_mask, no_context_norm)


@pytest.mark.parametrize("name", MADE)
def test_loading_and_saving_changes_no_byte(name: str, target: Path, tmp_path: Path) -> None:
    head = make(target, **MADE[name])
    save_head(head, tmp_path / "a", target_dir=target)
    again = load_any_head(tmp_path / "a", target, torch.float32)
    assert isinstance(again, DFlashHead) and isinstance(head, DFlashHead)
    assert (again.causal, again.block_size, again.aux_layers) == (head.causal, head.block_size, head.aux_layers)
    save_head(again, tmp_path / "b", target_dir=target)
    for file in ("config.json", "model.safetensors", "eagle_plugin.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    info = describe_block(target, tmp_path / "a")
    assert tuple(i + 1 for i in info.target_layers) == head.aux_layers and info.block == head.block_size
    config, weights = json.loads((tmp_path / "a/config.json").read_text()), load_file(tmp_path / "a/model.safetensors")
    assert config["model_type"] == "qwen3" and config["dflash_config"]["mask_token_id"] == 2
    assert config.get("is_causal", False) == head.causal
    own = "draft_ids" in MADE[name]
    assert (own, own) == ("lm_head.weight" in weights, "d2t" in weights) and ("draft_vocab_size" in config) == own


def test_export(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = tiny_dflash(tmp_path / "head", target, block=8)
    command = ["export", str(head), str(tmp_path / "new"), "--target", str(target)]
    assert main([*command, "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "SGLang: --speculative-algorithm DFLASH" in printed and '"num_speculative_tokens": 7' in printed
    before, after = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / "new"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    assert main([*command, "--window", "40"]) == 2
    assert "--window is for EAGLE heads" in capsys.readouterr().err


def test_an_embedding_of_its_own_is_kept(target: Path, tmp_path: Path) -> None:
    own = torch.randn(512, 64)
    folder = rewrite(
        tiny_dflash(tmp_path / "head", target), tmp_path / "own", weights=lambda w: w | {"embed_tokens.weight": own}
    )
    assert difference(target, folder) < 1e-4
    save_head(load_any_head(folder, target), tmp_path / "again", target_dir=target, dtype=torch.float32)
    assert load_file(tmp_path / "again/model.safetensors")["embed_tokens.weight"].equal(own)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"is_neox_style": False}, "is_neox_style, which only an engine computes"),
        ({"logit_scale": 0.5}, "logit_scale, which only an engine computes"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor, which only an engine computes"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor, which only an engine computes",
        ),
        ({"block_size": None}, "no block_size; write the rows of the block"),
        ({"architectures": ["DFlash2DraftModel"]}, "of the block drafters only dflash and dspark"),
    ],
)
def test_what_the_modules_do_not_compute_is_refused(
    changed: dict[str, Any], sentence: str, target: Path, tmp_path: Path
) -> None:
    folder = rewrite(tiny_dflash(tmp_path / "head", target), tmp_path / "other", lambda c: c | changed)
    with pytest.raises(HeadError, match=sentence):
        load_any_head(folder, target)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"aux_layers": (0, 2)}, r"aux layers are \[0, 2\], wanted rising ids from 1 to 7 for a block drafter"),
        ({"block_size": 1}, "block_size is 1, wanted 2 or more"),
        ({"window": 8}, "a window of 8 keys is for EAGLE-3 and P-EAGLE heads"),
        ({"mask_token_id": 512}, "mask_token_id is 512, wanted 0 to 511"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str, target: Path) -> None:
    new_head("dflash", target, mask_token_id=2)  # good without them
    with pytest.raises(HeadError, match=sentence):
        new_head("dflash", target, **{"mask_token_id": 2} | options)


def test_the_draft_vocabulary_changes_where_there_is_one(target: Path) -> None:
    head, whole = make(target, draft_ids=IDS), TargetFiles(target).lm_head()
    before, others = head.own_lm_head, torch.arange(100, 200)
    assert before is not None and head.change_vocabulary(others, whole) == 38
    after = head.own_lm_head
    assert after is not None and head.to_target(torch.arange(100)).equal(others)
    assert after[:38].equal(before[90:]) and after[38:].equal(whole[138:200])
    with pytest.raises(HeadError, match="this dflash head drafts from all tokens of its target"):
        make(target).change_vocabulary(others, whole)


@torch.no_grad()
def test_a_row_of_zeros_is_no_mask(target: Path, tmp_path: Path) -> None:
    """Ids without a token are the first choice, and their rows are often padding: from zeros all levels are alike."""
    padded = shutil.copytree(target, tmp_path / "target")
    tokenizer = json.loads((padded / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {t: i for t, i in tokenizer["model"]["vocab"].items() if i < 509}
    (padded / "tokenizer.json").write_text(json.dumps(tokenizer))
    empty, tokens = mask_token_candidates(padded)[:3], load_file(padded / "model.safetensors")
    tokens["model.embed_tokens.weight"][empty[:2]] = torch.tensor([[0.0], [1e-3]])
    save_file(tokens, padded / "model.safetensors")
    head = new_head("dflash", padded, layers=1)
    assert isinstance(head, DFlashHead) and head.mask_token_id == empty[2]
    features = target_features(AutoModelForCausalLM.from_pretrained(padded, dtype=torch.float32), head, TEXT)

    def spread() -> float:
        """The largest difference of log q between levels."""
        tail = DraftTail(head, prefill_head(head, TEXT, features), torch.tensor([9]), head.block_size - 1)
        assert tail.levels is not None
        log_q = head.logits(tail.levels[0]).log_softmax(-1)
        return float((log_q - log_q[:1]).abs().max())

    assert spread() > 0.01
    head.mask_token_id = empty[0]
    assert spread() < 1e-4
    for token in empty[:2]:
        with pytest.raises(HeadError, match=f"mask_token_id is {token}, whose embedding in .* is near zero"):
            new_head("dflash", padded, mask_token_id=token)
    # The features of P-EAGLE's masks are learnt: it may have such a token.
    assert new_head("peagle", padded, mask_token_id=empty[0]).mask_token_id == empty[0]
