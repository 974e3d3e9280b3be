"""A plugin for the test server: LoRA as on a GPU, on a CPU.

SGLang's backend of GPUs prepares the batches, and the two kernels that read them are computed in torch: rows by
`permutation`, `seg_indptr`, `weight_indices`, `lora_ranks` and `scalings`, on the device. What the host knows of a
batch, the number of segments that are looked at and their largest length, is a constant of a graph.

EAGLE_TEST_ADAPTERS_CONTROL=1 prepares nothing after the captures: the control.
"""

from __future__ import annotations

import os
from typing import Any

import broken_verifier
import torch
from torch import Tensor


def shrink(x: Tensor, weights: Tensor, batch_info: Any, num_slices: int) -> Tensor:
    """Rows [N, K] times the first matrices [adapters, slices * r, K] of their adapters.

    The slices of a smaller rank are side by side in front.
    """
    out = x.new_zeros(len(x), weights.shape[1])
    for segment in range(_segments(batch_info)):
        adapter, rows, inside = _rows_of(batch_info, segment, len(x))
        columns = torch.arange(weights.shape[1], device=x.device) < batch_info.lora_ranks[adapter] * num_slices
        product = x[rows] @ weights.index_select(0, adapter)[0].T
        out.index_add_(0, rows, torch.where(inside & columns, product, 0.0))
    return out


def expand(
    x: Tensor,
    weights: Tensor,
    batch_info: Any,
    slice_offsets: Tensor,
    max_slice_size: int,
    base_output: Tensor | None,
    slice_offsets_cpu: Tensor | None = None,
) -> Tensor:
    """Add rows of `shrink` times the second matrices [adapters, columns, r] of their adapters to base_output."""
    assert slice_offsets_cpu is not None
    columns, most = weights.shape[1:]
    out = x.new_zeros(len(x), columns) if base_output is None else base_output
    bounds = slice_offsets_cpu.numpy()
    places = torch.arange(most, device=x.device)
    for segment in range(_segments(batch_info)):
        adapter, rows, inside = _rows_of(batch_info, segment, len(x))
        rank, scaling = batch_info.lora_ranks[adapter], batch_info.scalings[adapter]
        matrix = weights.index_select(0, adapter)[0]
        for i, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            of_slice = (i * rank + places).clamp(max=x.shape[1] - 1)
            read = torch.where(places < rank, x[rows].index_select(1, of_slice), 0.0)
            product = read @ torch.where(places < rank, matrix[first:last], 0.0).T * scaling
            out[:, first:last].index_add_(0, rows, torch.where(inside, product, 0.0))
    return out


def _segments(batch_info: Any) -> int:
    return len(batch_info.weight_indices) if batch_info.use_cuda_graph else batch_info.num_segments


def _rows_of(batch_info: Any, segment: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The adapter of a segment [1], as many rows as a segment may have, and whether each is one of it [rows, 1]."""
    start, end = batch_info.seg_indptr[segment], batch_info.seg_indptr[segment + 1]
    adapter = batch_info.weight_indices[segment : segment + 1].long()
    places = start + torch.arange(batch_info.max_len, device=start.device)
    inside = (places < end) & (batch_info.lora_ranks[adapter] > 0)
    known = places.clamp(max=len(batch_info.permutation) - 1)
    rows = torch.where(inside, batch_info.permutation[known], 0).long()
    return adapter, rows, inside[:, None]


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from eagle_sglang_cpu import adapters as on_a_cpu
    from sglang.srt.lora.backend import chunked_backend

    from eagle_plugin.sglang.adapters import Adapters

    chunked_backend.chunked_sgmv_lora_shrink_forward = shrink
    chunked_backend.chunked_sgmv_lora_expand_forward = expand
    on_a_cpu.start_with_torch = on_a_cpu.without_pinning  # in place of the backend of CPUs
    if os.environ.get("EAGLE_TEST_ADAPTERS_CONTROL"):
        forget = Adapters.forget

        def only_until_captured(adapters: Adapters) -> None:
            forget(adapters)
            adapters._prepare = lambda *_: None  # type: ignore[method-assign]

        Adapters.forget = only_until_captured  # type: ignore[method-assign]


def install(folder: Any, control: bool = False) -> dict[str, str]:
    """Write the entry point into `folder`; returns the environment of the server."""
    environment = broken_verifier.install(folder, "sglang_gpu_adapters")
    return environment | ({"EAGLE_TEST_ADAPTERS_CONTROL": "1"} if control else {})
