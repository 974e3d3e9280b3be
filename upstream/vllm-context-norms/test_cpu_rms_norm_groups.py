# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""RMS norm of groups of rows, each with weights of its own."""

import pytest
import torch

from vllm import _custom_ops as ops
from vllm.platforms import current_platform


@pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernel")
def test_every_group_has_its_own_weights():
    torch.manual_seed(0)
    x, weights = torch.randn(3, 5, 2, 32), torch.rand(3, 32)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weights, 1e-6)
    unit = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(out, unit * weights[:, None, None])
