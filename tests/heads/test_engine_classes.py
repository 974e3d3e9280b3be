"""Our head modules compute what SGLang's own head classes compute, for every naming the checkpoint reader accepts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.layers import DraftHead

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def legacy_variant(source: Path, folder: Path) -> Path:
    """The same head as SpecForge names it: a model. prefix, one norm per aux state; and normed states handed on."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"use_aux_norm": True, "norm_output": True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer", "model.midlayer"): tensor for name, tensor in weights.items()}
    renamed |= {f"aux_norm_{level}.weight": torch.rand(64) + 0.5 for level in ("low", "mid", "high")}
    save_file(renamed, folder / "model.safetensors")
    return folder


@torch.no_grad()
def test_equal_to_the_engines_classes(
    tiny_target: Path, tiny_eagle2: Path, tiny_eagle3: Path, tiny_eagle3_reduced: Path, tmp_path: Path
) -> None:
    legacy = legacy_variant(tiny_eagle3, tmp_path / "legacy")
    heads = [("EAGLE", tiny_eagle2), ("EAGLE3", tiny_eagle3), ("EAGLE3", tiny_eagle3_reduced), ("EAGLE3", legacy)]
    n = 9
    inputs = {
        "tokens": torch.randint(512, (n,)),
        "positions": torch.arange(40, 40 + n),
        "EAGLE": torch.randn(n, 64),
        "EAGLE3": torch.randn(n, 192),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    script = [sys.executable, str(Path(__file__).with_name("engine_heads.py")), str(tiny_target), str(tmp_path)]
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        script + [f"{algorithm}={folder}" for algorithm, folder in heads],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    target = load_file(tiny_target / "model.safetensors")
    embedding, lm_head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    for i, (algorithm, folder) in enumerate(heads):
        info = check_head(tiny_target, folder, algorithm=algorithm)
        head: DraftHead
        if algorithm == "EAGLE":
            head = Eagle2Head.load(folder, embedding, lm_head)
        else:
            head = Eagle3Head.load(folder, info.aux_layer_ids, embedding, lm_head)
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        state, _ = head(head.embed(inputs["tokens"]), head.fuse(inputs[algorithm]), inputs["positions"], visible)
        engine = load_file(tmp_path / f"{i}.safetensors")
        torch.testing.assert_close(state, engine["state"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(state), engine["logits"], rtol=1e-4, atol=1e-4)
        if "target_ids" in engine:
            assert torch.equal(head.to_target(torch.arange(info.draft_vocab_size)), engine["target_ids"])
    assert "target_ids" in load_file(tmp_path / "2.safetensors")
