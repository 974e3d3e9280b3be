"""Heads that we export draft in vLLM's own classes what our modules draft: same layers, same states, same logits."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from head_round_trips import (
    assert_same,
    compare_drafts,
    draft,
    draw_tokens,
    in_draft_vocabulary,
    read_with_transformers,
)
from trained_heads import trained_head
from vllm_models import Served, load, make_config

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.peagle import PEagleHead

DRAFTS = 4
DRAFT_IDS = torch.arange(3, 512, 4)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "eagle2": {"kind": "eagle2"},
    "3.0": {"kind": "eagle3", "norms": "3.0"},
    "3.1, draft vocabulary": {"kind": "eagle3", "draft_ids": DRAFT_IDS},
    "3.1, own aux layers": {"kind": "eagle3", "aux_layers": (1, 4, 6)},
    "one norm before fc, two aux layers": {"kind": "eagle3", "norms": "before_fc", "aux_layers": (3, 5)},
    "one norm before fc, normed output": {"kind": "eagle3", "norms": "before_fc_output"},
    "two layers": {"kind": "eagle3", "layers": 2},
    "llama3 rope": {"kind": "eagle3", "rope": LLAMA3},
    "yarn rope": {"kind": "eagle3", "rope": YARN},
    "p-eagle": {"kind": "peagle", "mask_token_id": 2},
    "p-eagle, three layers, draft vocabulary": {
        "kind": "peagle",
        "mask_token_id": 2,
        "layers": 3,
        "norms": "3.0",
        "draft_ids": DRAFT_IDS,
    },
}
P_EAGLE = [name for name, options in CASES.items() if options["kind"] == "peagle"]


@dataclass
class Case:
    head: DraftHead  # as it was before the export
    target: Path
    served: Served


def make_target(path: Path, rope: dict[str, Any] | None = None) -> Path:
    tiny_models.tiny_llama(path, head_dim=32)  # the smallest that vLLM's CPU attention has
    config = json.loads((path / "config.json").read_text())
    if rope is not None:
        rope = rope | {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
        config |= {"rope_scaling": rope, "rope_parameters": rope}
    (path / "config.json").write_text(json.dumps(config))
    return path


def export(path: Path, target: Path, **options: Any) -> tuple[DraftHead, Path]:
    head = trained_head(options.pop("kind"), target, **options)
    save_head(head, path, target_dir=target, dtype=torch.float32)
    return head, path


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    options, folder = dict(CASES[request.param]), tmp_path_factory.mktemp("case")
    target = make_target(folder / "target", options.pop("rope", None))
    head, path = export(folder / "head", target, **options)
    return Case(head, target, load(target, path, head))


@pytest.mark.parametrize("case", CASES, indirect=True, scope="module")
def test_config(case: Case) -> None:
    """vLLM finds its class and takes sizes and limits as they were meant."""
    wanted = {"eagle2": "EagleLlamaForCausalLM"}.get(case.head.kind, "Eagle3LlamaForCausalLM")
    config = case.served.config.speculative_config.draft_model_config
    assert type(case.served.draft).__name__ == wanted
    assert config.dtype == torch.float32
    assert config.hf_config.max_position_embeddings == 2048
    assert case.served.aux_layers == case.head.aux_layers
    assert {p.dtype for p in case.served.draft.parameters() if p.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("case", CASES, indirect=True, scope="module")
def test_equal_to_vllms_classes(case: Case) -> None:
    compare_drafts(case.head, case.target, case.served)


@pytest.mark.parametrize("case", P_EAGLE, indirect=True, scope="module")
def test_p_eagles_masked_rows(case: Case) -> None:
    """All drafts of a round in one pass: masked rows after the verified ones."""
    head, served, tokens = case.head, case.served, draw_tokens(512)
    assert isinstance(head, PEagleHead)
    mask = served.drafter.parallel_drafting_hidden_state_tensor
    with torch.no_grad():
        assert_same(mask, head.mask_state()[0])
    assert served.drafter.parallel_drafting_token_id == head.mask_token_id
    features = served.read(tokens)
    rows = torch.cat([tokens.roll(-1), torch.full((DRAFTS - 1,), head.mask_token_id)])
    with torch.no_grad():
        hidden = torch.cat([head.fuse(features), head.mask_state().expand(DRAFTS - 1, -1)])
    ((logits, _),) = draft(head, rows, hidden, 1)
    found, _ = served.step(rows, torch.cat([served.fuse(features), mask.expand(DRAFTS - 1, -1)]))
    assert_same(in_draft_vocabulary(head, found), logits)
    assert not torch.allclose(logits[-1], logits[-2])  # the place of a masked row matters


# ---------------------------------------------------------------------------------------------------------------------
# Controls: what the comparison above must notice.


def change(source: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "eagle_plugin.json").unlink()  # its record of config.json would refuse the change
    return folder


def test_shifted_aux_layers_are_noticed(tmp_path: Path) -> None:
    """SGLang's ids in the key that vLLM reads give other layers, and so other drafts; vLLM reports no error."""
    target = make_target(tmp_path / "target")
    head, folder = export(tmp_path / "head", target, kind="eagle3", aux_layers=(1, 4, 6))
    shifted = change(folder, tmp_path / "shifted", eagle_aux_hidden_state_layer_ids=[0, 3, 5])
    served, tokens = load(target, shifted, head), draw_tokens(512)
    assert served.aux_layers == (0, 3, 5)
    features = served.read(tokens)
    ours = read_with_transformers(target, tokens, head.aux_layers)
    assert not torch.allclose(features, ours, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        ((logits, _),) = draft(head, tokens, head.fuse(ours), 1)
    assert not torch.allclose(served.step(tokens, served.fuse(features))[0], logits, rtol=1e-2, atol=1e-2)


def test_eagle2_needs_both_architectures(tmp_path: Path) -> None:
    """vLLM does not know the name that SGLang wants."""
    target = make_target(tmp_path / "target")
    head, folder = export(tmp_path / "head", target, kind="eagle2")
    alone = change(folder, tmp_path / "alone", architectures=["LlamaForCausalLMEagle"])
    with pytest.raises(ValueError, match="LlamaForCausalLMEagle'] are not supported"):
        load(target, alone, head)


def test_p_eagle_needs_its_mask(tmp_path: Path) -> None:
    """An EAGLE-3 head is refused for parallel drafting."""
    target = make_target(tmp_path / "target")
    _, folder = export(tmp_path / "head", target, kind="eagle3")
    with pytest.raises(ValueError, match="mask"):
        Served(make_config(target, folder, "eagle3", parallel=True))
