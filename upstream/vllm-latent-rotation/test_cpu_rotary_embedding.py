# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rotation of heads that have a dimension of their own, as those of MLA."""

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

HEAD_SIZE, NUM_HEADS, NUM_TOKENS = 16, 4, 5


@pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernel")
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("offset", [0, 32])
def test_forward_cpu_matches_native(is_neox_style, offset):
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(
            HEAD_SIZE, HEAD_SIZE, 64, 10000.0, is_neox_style, torch.float32
        )
    positions = torch.arange(NUM_TOKENS) + 3
    # With an offset, the rotated part of wider heads.
    query = torch.randn(NUM_TOKENS, NUM_HEADS, offset + HEAD_SIZE)[..., offset:]
    key = torch.randn(NUM_TOKENS, offset + HEAD_SIZE)[:, offset:].unsqueeze(1)
    expected = rope.forward_native(positions, query.contiguous(), key.contiguous())
    rotated = rope.forward_cpu(positions, query, key)
    torch.testing.assert_close(rotated, expected)
