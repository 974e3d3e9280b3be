"""vLLM's LoRA kernels of GPUs in Triton's interpreter, against those in torch by which tests serve LoRA as on a GPU.

test_gpu_adapters.py runs these tests, in a process that has Triton and its interpreter.
"""

from __future__ import annotations

import pytest
import torch
from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink
from vllm_gpu_adapters import expand, shrink

ROWS, INPUTS, RANK, SLICES = 12, 48, 8, (32, 16)


@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize("rows", [[-1, 0, 0, 2, 2, 2, -1, 0, 2, -1], [1] * 12, [-1] * 12], ids=["mixed", "one", "none"])
def test_both_compute_the_same(rows: list[int], specialised: bool) -> None:
    """Of a padded batch: the last two of 12 rows may have no adapter that is known."""
    generator = torch.Generator().manual_seed(1)
    meta = LoRAKernelMeta.make(3, ROWS, "cpu", captured_lora_counts=[1, 2, 4])
    meta.token_indices_sorted_by_lora_ids.fill_(7)
    meta.prepare_tensors(torch.tensor(rows))
    given = meta.meta_args(ROWS, specialised)

    def weights(columns: int, inputs: int) -> torch.Tensor:
        return torch.randn(3, 1, columns, inputs, generator=generator).to(torch.float16)

    first = tuple(weights(RANK, INPUTS) for _ in SLICES)
    second = tuple(weights(columns, RANK) for columns in SLICES)
    states = torch.randn(ROWS, INPUTS, generator=generator).to(torch.float16)
    between, same_between = (torch.zeros(len(SLICES), ROWS, RANK) for _ in range(2))
    out, same_out = (torch.ones(ROWS, sum(SLICES), dtype=torch.float16) for _ in range(2))
    # The interpreter does not read the addresses of several weights, so that the kernels get one after the other.
    for i, columns in enumerate(SLICES):
        lora_shrink(states, first[i : i + 1], between[i : i + 1], *given, 0.5)
        part = torch.ones(ROWS, columns, dtype=torch.float16)
        lora_expand(between[i : i + 1], second[i : i + 1], part, *given, offset_start=0, add_inputs=True)
        out[:, sum(SLICES[:i]) : sum(SLICES[: i + 1])] = part
    shrink(states, first, same_between, *given, 0.5)
    expand(same_between, second, same_out, *given, offset_start=0, add_inputs=True)
    torch.testing.assert_close(between, same_between, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, same_out, rtol=1e-2, atol=2e-2)
    has_adapter = torch.tensor([adapter >= 0 for adapter in rows] + [False] * (ROWS - len(rows)))
    assert torch.equal((same_out != 1).any(dim=1), has_adapter)
