"""A Llama with random weights in plain torch over a paged cache, whose attention is the plugin's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.roofline import Decoder
from eagle_plugin.kernels.attention import tree_attention
from eagle_plugin.kernels.kv import store_kv
from eagle_plugin.runtime.accept import KVCaches
from eagle_plugin.runtime.round import TreeRows

EPS, ROPE_BASE = 1e-5, 500_000.0  # of Llama 3


class Cache(NamedTuple):
    """Keys and values of the layers of one model; slot s of every layer belongs to the same token."""

    keys: list[Tensor]  # of each layer [slots, Hkv, D]
    values: list[Tensor]
    slot_table: Tensor  # [b, positions] int32

    @classmethod
    def empty(cls, model: Decoder, slot_table: Tensor, dtype: torch.dtype) -> Cache:
        """A cache for all slots of the table."""
        shape = (slot_table.numel(), model.kv_heads, model.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=slot_table.device) for _ in range(model.layers)] for _ in "kv"
        )
        return cls(keys, values, slot_table)

    def for_moves(self) -> KVCaches:
        """Where the rows are, for the move of the accepted ones."""
        tensors = [*self.keys, *self.values]
        device = self.slot_table.device
        return KVCaches(
            torch.tensor([x.data_ptr() for x in tensors], device=device),
            torch.tensor([x.stride(0) * x.element_size() for x in tensors], device=device),
            len(tensors[0]),
        )


class Rows(NamedTuple):
    """The rows of one forward: R per request, N in all."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64: where their keys and values go
    tree: TreeRows


class Rotary:
    """Rotary positions, the halves of a head rotated against each other."""

    def __init__(self, model: Decoder, positions: int, device: torch.device | str) -> None:
        steps = torch.arange(0, model.head_dim, 2, device=device).double() / model.head_dim
        angles = torch.arange(positions, device=device).double()[:, None] * ROPE_BASE**-steps
        self._cos, self._sin = angles.cos().float(), angles.sin().float()  # [positions, D / 2]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [N, heads, D]."""
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Layer:
    """One decoder layer; `inputs` is how many features q, k and v read."""

    def __init__(self, model: Decoder, random: Random, inputs: int | None = None) -> None:
        self.model = model
        heads = model.heads + 2 * model.kv_heads
        self.qkv = random.matrix(heads * model.head_dim, inputs or model.hidden)
        self.out = random.matrix(model.hidden, model.heads * model.head_dim)
        self.gate_up = random.matrix(2 * model.intermediate, model.hidden)
        self.down = random.matrix(model.hidden, model.intermediate)
        self.attention_norm, self.mlp_norm = random.ones(model.hidden), random.ones(model.hidden)

    def attend(self, x: Tensor, rows: Rows, cache: Cache, index: int, rotary: Rotary) -> Tensor:
        """Attention over normed inputs [N, inputs] -> [N, H]; their keys and values are stored first."""
        model = self.model
        qkv = functional.linear(x, self.qkv).view(len(x), -1, model.head_dim)
        q, k, v = qkv.split([model.heads, model.kv_heads, model.kv_heads], 1)
        keys, values = cache.keys[index], cache.values[index]
        store_kv(keys, values, rows.slots, rotary(k, rows.positions), v)
        tree = rows.tree
        attended = tree_attention(
            rotary(q, rows.positions),
            keys,
            values,
            cache.slot_table,
            tree.requests,
            tree.prefix_lens,
            tree.ancestors,
            tail=tree.tail,
            scale=model.head_dim**-0.5,
        )
        return functional.linear(attended.view(len(x), -1), self.out)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU over the normed residual [N, H] -> [N, H]."""
        gate, up = functional.linear(rms_norm(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down)


class Random:
    """Weights of one seed, made on the device."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """[rows, columns] that keeps the variance of its inputs, times the square of the gain."""
        values = torch.randn(rows, columns, device=self.device, dtype=self.dtype, generator=self._generator)
        return values.mul_(gain * columns**-0.5)

    def ones(self, n: int) -> Tensor:
        """The weight of a norm."""
        return torch.ones(n, device=self.device, dtype=self.dtype)


class Llama:
    """The target: logits and aux hidden states of tree rows."""

    def __init__(self, model: Decoder, aux_layers: tuple[int, ...], positions: int, random: Random) -> None:
        self.model, self.aux_layers = model, aux_layers
        self.embedding = random.matrix(model.vocabulary, model.hidden, gain=model.hidden**0.5)
        self.layers = [Layer(model, random) for _ in range(model.layers)]
        self.norm = random.ones(model.hidden)
        self.lm_head = random.matrix(model.vocabulary, model.hidden, gain=3.0)
        self.rotary = Rotary(model, positions, random.device)
        self.device, self.dtype = random.device, random.dtype

    def forward(self, rows: Rows, cache: Cache) -> tuple[Tensor, Tensor]:
        """Logits [N, V] float32, and the residual stream that enters each aux layer, side by side [N, 3 * H]."""
        x = self.embedding[rows.tokens]
        aux = []
        for i, layer in enumerate(self.layers):
            if i in self.aux_layers:
                aux.append(x)
            x = x + layer.attend(rms_norm(x, layer.attention_norm), rows, cache, i, self.rotary)
            x = x + layer.mlp(x)
        return functional.linear(rms_norm(x, self.norm), self.lm_head).float(), torch.cat(aux, -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root mean square norm over the last axis."""
    return functional.rms_norm(x, (x.shape[-1],), weight, EPS)
