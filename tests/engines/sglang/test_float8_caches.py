"""SGLang's pools of 8-bit floats: what our attention writes is what the engine would, and it reads what is there.

On a CPU the engine has such a cache with AMX alone, in a form of its own. The pool of GPUs is made here on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang.srt.mem_cache.memory_pool", reason="the SGLang environment is not installed")

from sglang.srt.mem_cache import kv_cache_dtype
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.kernels import attention_torch
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.sglang import attention
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.caches import NAMES

SLOTS, HEADS, KV_HEADS, DIM, PREFIX, NODES = 40, 4, 2, 64, 9, 5
STORED = [torch.float8_e4m3fn, torch.float8_e5m2]


def make_pool(dtype: torch.dtype) -> Any:
    return MHATokenToKVPool(SLOTS, 1, dtype, KV_HEADS, DIM, 1, "cpu", False)


def make_layer(scales: Any) -> Any:
    """scales: as a checkpoint has them, as a file has, or none."""
    k_scale, v_scale = {
        "none": (None, None),
        "parameters": [torch.nn.Parameter(torch.tensor(x), requires_grad=False) for x in (0.013, 0.3)],
        "numbers": (0.013, 0.3),
    }[scales]
    return SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.1, logit_cap=0.0,
        sliding_window_size=-1, use_irope=False, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


class Forward:
    """A prompt that the engine has stored, and nodes of a chain after it."""

    def __init__(self, dtype: torch.dtype, scales: str) -> None:
        torch.manual_seed(0)
        self.pool, self.layer = make_pool(dtype), make_layer(scales)
        self.slots = torch.randperm(SLOTS - 1)[: PREFIX + NODES] + 1
        self.k, self.v = (torch.randn(PREFIX + NODES, KV_HEADS, DIM).bfloat16() * 3 for _ in range(2))
        self.q = torch.randn(NODES, HEADS * DIM).bfloat16()
        self.store(slice(0, PREFIX), self.pool)

    def store(self, rows: slice, pool: Any) -> None:
        """As the engine's Triton backend does it."""
        layer = self.layer
        pool.set_kv_buffer(
            layer, self.slots[rows], self.k[rows].clone(), self.v[rows].clone(), layer.k_scale, layer.v_scale
        )

    def ours(self) -> Tensor:
        rows = TreeRows(
            torch.tensor([0]), torch.tensor([PREFIX]), chain_ancestors(NODES, torch.device("cpu"))[None], NODES
        )
        info = SimpleNamespace(tree_rows=rows, slot_table=self.slots[None].int())
        batch = SimpleNamespace(spec_info=info, out_cache_loc=self.slots[PREFIX:])
        made = TreeAttention(SimpleNamespace(token_to_kv_pool=self.pool))
        return made.forward(self.q, self.k[PREFIX:], self.v[PREFIX:], self.layer, batch)

    def wanted(self) -> Tensor:
        """Attention to what the engine's own writes leave in the pool."""
        pool = make_pool(self.pool.dtype)
        self.store(slice(0, PREFIX + NODES), pool)
        keys, values = (buffer(0)[self.slots] for buffer in (pool.get_key_buffer, pool.get_value_buffer))
        by = [1.0 if x is None else float(x) for x in (self.layer.k_scale, self.layer.v_scale)]
        seen = attention_torch.tree_visible(chain_ancestors(NODES, keys.device), PREFIX, NODES, -1)
        q = self.q.view(NODES, HEADS, DIM)
        return attention_torch.attend(q, keys.float() * by[0], values.float() * by[1], seen, scale=0.1).flatten(1)


@pytest.mark.parametrize("scales", ["none", "parameters", "numbers"])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_the_pool_gets_the_engines_bits(dtype: torch.dtype, scales: str) -> None:
    """So a later step reads of an accepted node what it would read after plain decoding."""
    forward, other = Forward(dtype, scales), make_pool(dtype)
    forward.ours()
    forward.store(slice(0, PREFIX + NODES), other)
    for found, wanted in zip(
        forward.pool.k_buffer + forward.pool.v_buffer, other.k_buffer + other.v_buffer, strict=True
    ):
        assert torch.equal(found.view(torch.uint8)[forward.slots], wanted.view(torch.uint8)[forward.slots])


@pytest.mark.parametrize("scales", ["none", "parameters", "numbers"])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_attention_reads_what_the_pool_holds(dtype: torch.dtype, scales: str) -> None:
    forward = Forward(dtype, scales)
    torch.testing.assert_close(forward.ours(), forward.wanted(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fault", ["ignored", "exchanged"])
def test_wrong_scales_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls."""
    found = attention.scales_of

    def wrong(*given: Any) -> Any:
        return (None, None) if fault == "ignored" else found(*given)[::-1]

    forward = Forward(torch.float8_e4m3fn, "parameters")
    monkeypatch.setattr(attention, "scales_of", wrong)
    assert (forward.ours() - forward.wanted()).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_the_engines_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_dtype, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    for flags in ({"server_args_kv_cache_dtype": name}, {"speculative_draft_kv_cache_dtype": name}):
        given = {"server_args_kv_cache_dtype": "auto", "is_draft_worker": True} | flags
        _, found = kv_cache_dtype.configure_kv_cache_dtype(
            model=None,
            model_dtype=torch.bfloat16,
            is_dflash=False,
            speculative_draft_attention_backend="",
            **given,
        )
        assert found == getattr(torch, NAMES[name])
