"""Which norms of a target add 1 to their weight: read from the source of transformers, compared with their results."""

from __future__ import annotations

import pytest
import torch
from tiny_targets import ARCHITECTURES, tiny_target

from eagle_plugin.heads.target_files import adds_one

NAMES = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_as_the_norms_compute(model_type: str) -> None:
    model = tiny_target(model_type)
    decoder = getattr(model, "model", model)
    norms = {"norm": decoder.norm, **{name: getattr(decoder.layers[0], name, None) for name in NAMES}}
    for name, norm in norms.items():
        if norm is not None:
            norm.weight.data.zero_()
            x = torch.arange(1.0, 1 + len(norm.weight))[None]
            assert bool(norm(x).any()) == adds_one(model_type, name), name


def test_of_targets_that_are_not_built_here() -> None:
    for model_type in ("gemma", "gemma3", "qwen3_5_text", "qwen3_5_moe", "vaultgemma", "minimax_m3_vl_text"):
        assert adds_one(model_type, "norm"), model_type
    assert adds_one("muse_glimmer_text", "input_layernorm") and not adds_one("muse_glimmer_text", "norm")
    assert not adds_one("no_such_type", "norm") and not adds_one("../llama", "norm")
