"""vLLM's LoRA as on a GPU, on a CPU: its class for GPUs, with its metadata of a step, and its two kernels in torch.

`shrink` and `expand` take what vLLM gives its kernels and read what those read: rows by `order`, `counts`, `starts` and
`ids`, on the device; `no_lora` and `slots` on the host, so that they are constants of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu
from vllm.platforms import current_platform


def shrink(
    rows: Tensor,  # [N, H]
    weights: Sequence[Tensor],  # of each slice [adapters, 1, r, H]
    out: Tensor,  # [slices, N, r] float32
    mapping: Tensor,
    order: Tensor,  # [N] int32: the rows of one adapter after those of another
    counts: Tensor,  # [adapters + 1] int32: rows of each of `ids`
    starts: Tensor,  # [adapters + 2] int32: their first places in `order`
    ids: Tensor,  # [adapters + 1] int32: -1 of no adapter, and at the end
    no_lora: Tensor,
    slots: Tensor,
    scale: float,
) -> None:
    """Multiply each row by the first matrix of its adapter; without an adapter anywhere `out` stays as it was."""
    if _of_host(no_lora):
        return
    out.zero_()
    for slot in range(_of_host(slots)):
        chosen, is_of_slot = _rows_of(slot, order, counts, starts, ids)
        for part, weight in zip(out, weights, strict=True):
            product = rows[chosen].float() @ _of_adapter(weight, ids, slot).float().T * scale
            part.index_add_(0, chosen, torch.where(is_of_slot, product, 0.0))


def expand(
    rows: Tensor,  # [slices, N, r]
    weights: Sequence[Tensor],  # of each slice [adapters, 1, columns, r]
    out: Tensor,  # [N, columns of all slices]
    mapping: Tensor,
    order: Tensor,
    counts: Tensor,
    starts: Tensor,
    ids: Tensor,
    no_lora: Tensor,
    slots: Tensor,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """Add the products of `shrink` and the second matrices of the adapters to `out`."""
    assert add_inputs
    if _of_host(no_lora):
        return
    for slot in range(_of_host(slots)):
        chosen, is_of_slot = _rows_of(slot, order, counts, starts, ids)
        first = offset_start
        for part, weight in zip(rows, weights, strict=True):
            matrix = _of_adapter(weight, ids, slot)
            product = part[chosen] @ matrix.to(part.dtype).T
            columns = out[:, first : first + len(matrix)]
            columns.index_add_(0, chosen, torch.where(is_of_slot, product, 0.0).to(out.dtype))
            first += len(matrix)


def _of_host(value: Tensor) -> int:
    """The number in a tensor of the host, for which a GPU waits for nothing."""
    return int(value.numpy()[0])


def _rows_of(slot: int, order: Tensor, counts: Tensor, starts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """One row per place [N], and whether it is one of this slot's [N, 1]; others are row 0."""
    places = torch.arange(len(order), device=order.device)
    found = (places >= starts[slot]) & (places < starts[slot] + counts[slot]) & (ids[slot] >= 0)
    return torch.where(found, order, 0).long(), found[:, None]


def _of_adapter(weight: Tensor, ids: Tensor, slot: int) -> Tensor:
    return weight.index_select(0, ids[slot : slot + 1].clamp(min=0))[0].squeeze(0)


@contextmanager
def adapters_of_gpus() -> Iterator[None]:
    """Engines that are made in the block have vLLM's class for GPUs."""
    name = f"{punica_gpu.__name__}.{punica_gpu.PunicaWrapperGPU.__qualname__}"
    with pytest.MonkeyPatch.context() as patch:
        # Without Triton it has none of them.
        for of_kernels, value in (("LoRAKernelMeta", LoRAKernelMeta), ("lora_shrink", shrink), ("lora_expand", expand)):
            patch.setattr(punica_gpu, of_kernels, value, raising=False)
        patch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: name))
        yield
