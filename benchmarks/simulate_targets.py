"""How long the forwards of a decode round take on a GPU: a roofline with stated efficiencies and gaps.

A forward takes the root of the sum of the squares of its memory time and its compute time (a roofline without a sharp
corner), plus a gap per layer for what neither explains: launches inside the CUDA graph, small kernels, synchronisation.
All seconds; weights and keys are split evenly over the GPUs of a target.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks.roofline import AUX_LAYERS, DRAFT_VOCABULARY, LLAMA_8B, Decoder, Device
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import Costs, Curve, Forward

MEMORY_EFFICIENCY = 0.85  # of the data sheet's bandwidth
COMPUTE_EFFICIENCY = 0.6  # of the data sheet's dense bf16 FLOPs
ATTENTION_EFFICIENCY = 0.3  # the same of tree attention: few query rows per key
ALL_REDUCE = 8e-6  # latency of one over NVLink; two per layer
NVLINK = 450e9  # bytes per second and direction
OVERLAPPED = 100e-6  # fixed cost of a round of an engine whose host works ahead: tree building, walk, cache moves
FORWARD = 50e-6  # launch of a captured graph and the top-k after it, per forward of the head
TABLE_ROWS = [n * m // 2 for n in (2**i for i in range(17)) for m in (2, 3)]  # where the policy's tables are measured


class Experts(NamedTuple):
    """The feed-forward part of a mixture of experts."""

    count: int
    per_token: int
    intermediate: int
    itemsize: float  # bytes per weight

    def touched(self, rows: int) -> float:
        """Expected experts that `rows` rows read in a layer, each row choosing evenly and independently.

        The rows of one tree choose more alike than that, so this is an upper limit of the cost of verification.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


class Target(NamedTuple):
    """A target model with a published EAGLE-3 head."""

    name: str
    decoder: Decoder
    gpus: int
    gap: float  # seconds per layer that neither memory nor compute explains
    experts: Experts | None = None
    cached_layers: float = 0.0  # whose whole prefixes are read, if not all: the others have a short window
    head: Decoder | None = None  # whose layer the draft head has, if not the target's

    def shared_weights(self) -> float:
        """Elements that every forward reads: attention, lm_head and, without experts, the feed-forward part."""
        if self.experts is None:
            return self.decoder.target_weights()
        return self.decoder._replace(intermediate=0).target_weights()

    def expert_weights(self) -> int:
        """Elements of one expert of one layer."""
        return 0 if self.experts is None else 3 * self.decoder.hidden * self.experts.intermediate

    def draft_head(self) -> Decoder:
        return self.head or self.decoder


# Qwen/Qwen3-Coder-30B-A3B-Instruct; openai/gpt-oss-120b, whose experts are MXFP4 (4.25 bits per weight) and whose every
# other layer attends to 128 tokens. Heads have one dense layer.
DENSE_GAP, MOE_GAP = 33e-6, 55e-6  # from published speeds of plain decoding
QWEN_CODER = Decoder(48, 2048, 0, 32, 4, 128, 151936)
GPT_OSS = Decoder(36, 2880, 0, 64, 8, 64, 201088)
TARGETS = {
    target.name: target
    for target in (
        Target("Llama-3.1-8B", LLAMA_8B, 1, DENSE_GAP),
        Target("Llama-3.3-70B", Decoder(80, 8192, 28672, 64, 8, 128, 128256), 8, DENSE_GAP),
        Target(
            "Qwen3-Coder-30B-A3B", QWEN_CODER, 1, MOE_GAP, Experts(128, 8, 768, 2),
            head=QWEN_CODER._replace(intermediate=12288),
        ),
        Target(
            "GPT-OSS-120B", GPT_OSS, 1, MOE_GAP, Experts(128, 4, 2880, 0.53), cached_layers=18,
            head=GPT_OSS._replace(intermediate=17280),
        ),
    )
}  # fmt: skip


class Machine(NamedTuple):
    """A target on its GPUs, with the fixed cost of a speculative round."""

    device: Device
    target: Target
    fixed: float  # seconds of the host and of small kernels in a speculative round, beyond those of a plain step
    layers_of_head: int = 1
    is_parallel: bool = False  # P-EAGLE: one forward of the head drafts all levels

    def target_seconds(self, rows: int) -> float:
        """A forward of the target over so many rows, without its prefixes."""
        target, decoder = self.target, self.target.decoder
        read, computed = target.shared_weights() * 2.0, float(target.shared_weights())
        if target.experts is not None:
            each = decoder.layers * target.expert_weights()
            read += each * target.experts.touched(rows) * target.experts.itemsize
            computed += each * target.experts.per_token
        read += 8 * rows * decoder.vocabulary  # float32 logits, written and read
        reduced = 0.0
        if target.gpus > 1:
            sent = 2 * 2 * rows * decoder.hidden * (target.gpus - 1) / target.gpus
            reduced = 2 * decoder.layers * (ALL_REDUCE + sent / NVLINK)
        return self._roofline(read, 2 * rows * computed) + decoder.layers * target.gap + reduced

    def head_seconds(self, rows: int, is_extend: bool) -> float:
        """A forward of the head; an extend also fuses the hidden states of the target."""
        decoder = self.target.draft_head()
        weights = self.layers_of_head * decoder.layer_weights(2 * decoder.hidden) + decoder.hidden * DRAFT_VOCABULARY
        if is_extend:
            weights += AUX_LAYERS * decoder.hidden**2
        read = 2 * weights + 8 * rows * DRAFT_VOCABULARY
        return self._roofline(read, 2.0 * rows * weights) + self.layers_of_head * self.target.gap + FORWARD

    def keys(self, layers: float) -> tuple[float, float]:
        """Seconds per token of the prefixes: to read it, and to compute with it per row of its request."""
        decoder = self.target.decoder
        read = layers * decoder.kv_elements() * 2 / (self.device.bandwidth * MEMORY_EFFICIENCY)
        computed = layers * 4 * decoder.heads * decoder.head_dim / (self.device.flops * ATTENTION_EFFICIENCY)
        return read / self.target.gpus, computed / self.target.gpus

    def seconds(self, shape: Shape, b: int, keys: int) -> float:
        """A round of b requests whose prefixes have `keys` tokens together; in a plain one the head does not run."""
        steps, topk, width = shape
        read, computed = self.keys(self.layers_of_head)
        if shape == PLAIN:
            return self.fixed + self._verify(width, b, keys)
        levels = max(steps - 1, 0)
        rows = shape.max_accept_length + (levels if self.is_parallel else 0)
        total = self.fixed + self._verify(width, b, keys)
        total += self.head_seconds(b * rows, True) + keys * (read + computed * rows)
        if self.is_parallel:
            return total
        return total + levels * (self.head_seconds(b * topk, False) + keys * (read + computed * topk))

    def plain_seconds(self, b: int, keys: int) -> float:
        """A step of plain decoding, without a head."""
        return self._verify(1, b, keys)

    def costs(self) -> Costs:
        """The tables that the policy is given: the same, measured at some numbers of rows, the head kept up to date."""

        def forward(seconds: dict[int, float], layers: float) -> Forward:
            return Forward(Curve.of(seconds.items()), *self.keys(layers))

        cached = self.target.cached_layers or self.target.decoder.layers
        return Costs(
            forward({rows: self.target_seconds(rows) for rows in TABLE_ROWS}, cached),
            forward({rows: self.head_seconds(rows, False) for rows in TABLE_ROWS}, self.layers_of_head),
            forward({rows: self.head_seconds(rows, True) for rows in TABLE_ROWS}, self.layers_of_head),
            self.fixed,
        )

    def _verify(self, width: int, b: int, keys: int) -> float:
        read, computed = self.keys(self.target.cached_layers or self.target.decoder.layers)
        return self.target_seconds(b * width) + keys * (read + computed * width)

    def _roofline(self, read: float, flops: float) -> float:
        memory = read / (self.device.bandwidth * MEMORY_EFFICIENCY)
        return math.hypot(memory, flops / (self.device.flops * COMPUTE_EFFICIENCY)) / self.target.gpus
