"""What vLLM's FlashAttention computes for paged keys and values, in plain torch, with what its kernels refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flash_attention(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None,
    softcap: float,
    block_table: Tensor,
    s_aux: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """q [n, Hq, D]; k and v [blocks, block size, Hkv, D] -> [n, Hq, D]; the last query of a request is its last token.

    AssertionError for arguments that the kernels do not take.
    """
    check(q, k, v, cu_seqlens_q, seqused_k, block_table, out)
    assert causal and (s_aux is None or s_aux.dtype == q.dtype == torch.bfloat16)
    left, right = window_size or (-1, -1)
    assert right in (-1, 0)
    found = torch.empty_like(q) if out is None else out
    bounds = cu_seqlens_q.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(q)
    size, group = k.shape[1], q.shape[1] // k.shape[2]
    for i, n in enumerate(seqused_k.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        count = rows.stop - rows.start
        assert 0 < count <= max_seqlen_q and n <= max_seqlen_k
        blocks = block_table[i, : -(-n // size)].long()
        keys, values = (x[blocks].flatten(0, 1)[:n].repeat_interleave(group, dim=1).float() for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * softmax_scale
        logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
        distance = torch.arange(n - count, n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
        logits = logits.masked_fill(hidden, -torch.inf)
        if s_aux is not None:  # one more logit per head, of a key without a value
            logits = torch.cat([logits, s_aux.float()[:, None, None].expand(-1, count, 1)], dim=-1)
        p = logits.softmax(-1)[..., :n]
        found[rows] = torch.einsum("hqk,khd->qhd", p, values).to(q.dtype)
    return found


def check(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, lens: Tensor, table: Tensor, out: Tensor | None) -> None:
    """What the kernels refuse of devices, types, shapes and strides; without a look at values."""
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        assert tensor.dtype == q.dtype and tensor.dtype in (torch.float16, torch.bfloat16), name
        assert tensor.stride(-1) == 1, f"{name} has gaps inside its rows"
        aligned = [stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1]]
        assert all(aligned) and tensor.storage_offset() * tensor.element_size() % 16 == 0, f"{name} is not aligned"
    assert k.shape == v.shape and k.shape[1] % 16 == 0 and q.shape[2] == k.shape[3] <= 256
    assert all(x.dtype == torch.int32 and x.device == q.device for x in (bounds, lens, table))
    assert table.stride(-1) == 1 and len(table) == len(lens) == len(bounds) - 1
