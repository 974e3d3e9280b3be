"""The round trip on targets of other architectures: vLLM's own class of the target captures the right layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_round_trips import compare_drafts
from tiny_targets import write_target
from trained_heads import trained_head
from vllm_models import load

from eagle_plugin.heads.export import save_head

# 32 is the smallest head of vLLM's attention on a CPU.
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 128}


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss", "gemma3_text"])
def test_equal_to_vllms_classes(model_type: str, tmp_path: Path) -> None:
    """Kind "auto" makes an EAGLE-3 head where vLLM's class of the target captures, else (Gemma 3) an EAGLE-2 head."""
    target = write_target(tmp_path / "target", model_type, **SHAPE)
    head = trained_head("auto", target, aux_layers=(1, 3, 6))
    save_head(head, tmp_path / "head", target_dir=target, dtype=torch.float32)
    served = load(target, tmp_path / "head", head)
    assert served.aux_layers == head.aux_layers == (() if model_type == "gemma3_text" else (1, 3, 6))
    compare_drafts(head, target, served)
