"""DSpark heads: what is stored, read again and refused, and that they compute what `dflash_reference` computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import DFlashReference
from dspark_models import dspark_head, tiny_dspark
from safetensors.torch import load_file
from tiny_models import markov_target, read_markov_map, tiny_llama
from trained_heads import rewrite, trained_head
from transformers import AutoModelForCausalLM

from eagle_plugin.cli import main
from eagle_plugin.heads.block_drafter import SGLANG, VLLM, describe_block
from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.dspark import DSparkHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError, LeftToEngine
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.reference.draft import DraftTail, prefill_head
from eagle_plugin.learning.reference.target import target_features
from eagle_plugin.learning.train.recipe import HeadSettings

BLOCK = 6
IDS = list(range(10, 138))
TEXT = [3 + 7 * i % 400 for i in range(24)]
CASES: dict[str, dict[str, Any]] = {
    "anchor": {},
    "fill-in": {"anchor": False},
    "causal": {"is_causal": True},
    "a draft vocabulary": {"kept": IDS},
    "a confidence head": {"confidence": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("dspark") / "target", head_dim=32)


@torch.no_grad()
def difference(target: Path, folder: Path, change: Callable[[DSparkHead], object] = lambda head: None) -> float:
    """The largest difference of logits between our module and the reference, of all levels after some tokens and
    after any tokens of the levels before; change: does something to our module first."""
    reference, head = DFlashReference(target, folder), load_any_head(folder, target)
    assert isinstance(head, DSparkHead)
    levels = head.block_size - head.first_row
    change(head)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prefill, apart = prefill_head(head, TEXT, target_features(model, head, TEXT)), 0.0
    for root in (1, 9, 23):
        tail = DraftTail(head, prefill, torch.tensor([root]), levels)
        assert tail.levels is not None
        before = [TEXT[root], *(5 + 31 * root * i % 500 for i in range(1, levels))]
        wanted = reference.logits(TEXT[: root + 1], head.block_size)[:levels]
        wanted += torch.stack([reference.bias(token) for token in before])
        found = head.logits_after(tail.levels[0], torch.tensor(before))
        apart = max(apart, float((found - wanted).abs().max()))
    return apart


def other_row(head: DSparkHead) -> None:
    head.first_row = 1 - head.first_row


def other_bias(head: DSparkHead) -> None:
    head.markov_head.markov_w1.weight.data = head.markov_head.markov_w1.weight.roll(1, 0)


@pytest.mark.parametrize("case", CASES)
def test_computes_what_the_reference_computes(case: str, target: Path, tmp_path: Path) -> None:
    head = tiny_dspark(tmp_path / "head", target, block=BLOCK, **CASES[case])
    assert difference(target, head) < 1e-4
    for fault in (other_row, other_bias):
        assert difference(target, head, fault) > 0.1, fault


@pytest.mark.parametrize("case", CASES)
def test_loading_and_saving_keeps_the_head(case: str, target: Path, tmp_path: Path) -> None:
    """The published keys and all tensors; the second time no byte changes."""
    folder = tiny_dspark(tmp_path / "head", target, block=BLOCK, **CASES[case])
    for name, source in (("a", folder), ("b", tmp_path / "a")):
        save_head(load_any_head(source, target), tmp_path / name, target_dir=target, dtype=torch.float32)
    for file in ("config.json", "model.safetensors", "eagle_plugin.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "a"))
    kept = "architectures model_type mask_token_id target_layer_ids block_size markov_rank markov_head_type"
    for key in (*kept.split(), "sample_from_anchor", "is_causal", "draft_vocab_size"):
        assert before.get(key) == after.get(key), key
    has_confidence = after["enable_confidence_head"], after["confidence_head_with_markov"]
    assert has_confidence == (case == "a confidence head",) * 2 and "dflash_config" not in after
    stored, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "a"))
    stored.pop("t2d", None)
    assert stored.keys() == written.keys() and all(stored[name].equal(written[name]) for name in stored)
    info = describe_block(target, tmp_path / "a")
    assert (info.kind, info.block, info.levels) == ("dspark", BLOCK, BLOCK - (case == "fill-in"))


def test_a_new_head(target: Path, tmp_path: Path) -> None:
    head = trained_head("dspark", target, mask_token_id=2, layers=2, block_size=5, draft_ids=torch.tensor(IDS))
    save_head(head, tmp_path / "head", target_dir=target, dtype=torch.float32)
    assert difference(target, tmp_path / "head") < 1e-4
    with pytest.raises(HeadError, match="a dspark head is not trained here, so its vocabulary stays"):
        head.change_vocabulary(torch.arange(9), torch.zeros(512, 64))
    with pytest.raises(ValueError, match="'auto', 'dflash', 'eagle2', 'eagle3' or 'peagle'"):
        HeadSettings(kind="dspark")
    assert new_head("dspark", target, mask_token_id=2).spec.objective is None


def test_export_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its drafts are measured: those of a drafter that knows the target are all right."""
    target = markov_target(tmp_path / "target")
    known = dspark_head(tmp_path / "head", target, sorted(set(read_markov_map(target).tolist())), block=4)
    command = ["export", str(known), str(tmp_path / "new"), "--target", str(target), "--dtype", "float32"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert '"method": "dspark"' in printed and '"num_speculative_tokens": 4' in printed
    assert main(["check", str(target), str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    for line in (
        "kind               dspark (block drafter)",
        'vLLM               "method": "dspark" in --speculative-config',
        "block              4 tokens, each of which drafts one",
    ):
        assert line + "\n" in printed
    assert "Qwen3DSparkModel, 1 layer(s)" in printed and "first draft right for 100.0%, accept length 5.00" in printed


def test_what_others_serve_is_left(target: Path, tmp_path: Path) -> None:
    head = tiny_dspark(tmp_path / "head", target, block=BLOCK)
    for name, changed, sentence in (
        ("gated", {"markov_head_type": "gated"}, "markov_head_type gated: only vanilla Markov heads are served"),
        ("other", {"architectures": ["Gemma4DSparkModel"]}, "of the block drafters only dflash and dspark"),
        ("self", {"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"}, "only dflash and dspark"),
    ):
        folder = rewrite(head, tmp_path / name, lambda c, changed=changed: c | changed)
        with pytest.raises(LeftToEngine, match=sentence):
            load_any_head(folder, target)
    renamed = rewrite(head, tmp_path / "renamed", lambda c: c | {"architectures": ["DSparkDraftModel"]})
    assert describe_block(target, renamed).kind == "dspark"
    assert describe_block(target, head, SGLANG).kind == "dspark"


def test_what_an_engine_finds_without_a_key_is_left(target: Path, tmp_path: Path) -> None:
    """vLLM a mask under another name and rows of an embedding beyond the target's, SGLang default layers."""
    head = tiny_dspark(tmp_path / "head", target, block=BLOCK)
    keys: dict[str, dict[str, Any]] = {
        "wide": {"vocab_size": 576},
        "mask": {"mask_token_id": None, "pard_token": 2},
        "layers": {"target_layer_ids": None},
        "no mask": {"mask_token_id": None},
    }
    wide = {"embed_tokens.weight": torch.zeros(576, 64), "markov_head.markov_w1.weight": torch.zeros(576, 16)}
    found = {
        name: rewrite(head, tmp_path / name, lambda c, k=k: c | k, lambda w, n=name: w | wide if n == "wide" else w)
        for name, k in keys.items()
    }
    for engine, name, left in (
        (VLLM, "wide", True),
        (VLLM, "mask", True),
        (VLLM, "layers", True),
        (VLLM, "no mask", False),
        (SGLANG, "wide", False),
        (SGLANG, "mask", False),
        (SGLANG, "layers", True),
    ):
        with pytest.raises(HeadError) as refused:
            describe_block(target, found[name], engine)
        assert isinstance(refused.value, LeftToEngine) == left, (engine.name, name, refused.value)


def test_a_projector_that_repeats_the_kind(target: Path, tmp_path: Path) -> None:
    head = tiny_dspark(tmp_path / "head", target, block=BLOCK)
    for value in ("dspark", "domino"):
        folder = rewrite(head, tmp_path / value, lambda c, v=value: c | {"dflash_config": {"projector_type": v}})
        if value == "dspark":
            assert describe_block(target, folder, SGLANG) == describe_block(target, head, SGLANG)
        else:
            with pytest.raises(LeftToEngine, match="projector_type in dflash_config: only plain drafters"):
                describe_block(target, folder, SGLANG)
