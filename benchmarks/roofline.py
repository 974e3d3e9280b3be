"""What a decode round reads and writes on a GPU: pure arithmetic.

A forward of few rows reads all weights of its layers once and the keys and values of its requests once.
"""

from __future__ import annotations

from typing import NamedTuple

from eagle_plugin.core.shape import Shape


class Device(NamedTuple):
    """A GPU."""

    name: str
    bandwidth: float  # bytes per second
    flops: float  # of dense bf16 matrix products, per second


H100 = Device("H100", 3.35e12, 989e12)  # NVIDIA H100 SXM data sheet
H200 = Device("H200", 4.8e12, 989e12)  # NVIDIA H200 data sheet
B200 = Device("B200", 8e12, 2250e12)  # NVIDIA HGX B200 data sheet, one GPU


class Decoder(NamedTuple):
    """The shape of a Llama, or of the part of it that a forward reads."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def layer_weights(self, inputs: int | None = None) -> int:
        """Elements of a layer's matrices; inputs: rows of q, k and v, if not the hidden size."""
        attention = (self.heads + 2 * self.kv_heads) * self.head_dim * (inputs or self.hidden)
        return attention + self.heads * self.head_dim * self.hidden + 3 * self.hidden * self.intermediate

    def target_weights(self) -> int:
        """Elements that a forward of the target reads: the layers and lm_head; of the embedding only a few rows."""
        return self.layers * self.layer_weights() + self.hidden * self.vocabulary

    def head_weights(self, draft_vocabulary: int) -> int:
        """Elements that a level of an EAGLE-3 head reads: one layer over [embedding; hidden], and its lm_head."""
        return self.layer_weights(2 * self.hidden) + self.hidden * draft_vocabulary

    def kv_elements(self) -> int:
        """Elements of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim


LLAMA_8B = Decoder(32, 4096, 14336, 32, 8, 128, 128256)  # meta-llama/Llama-3.1-8B
DRAFT_VOCABULARY, AUX_LAYERS = 32000, 3  # of the published EAGLE-3 heads of that model


class Bytes(NamedTuple):
    """What each phase of a round reads or writes of weights, keys, values and logits."""

    draft: float
    verify: float
    tail: float
    extend: float


def round_bytes(
    model: Decoder,
    shape: Shape,
    batch: int,
    context: int,
    itemsize: int = 2,
    draft_vocabulary: int = DRAFT_VOCABULARY,
) -> Bytes:
    """Bytes of a round of `batch` requests with `context` tokens each; weights and cache have `itemsize` bytes.

    Logits are float32: written by a forward and read once, those of the target by the tail. Level 1 of the draft needs
    no forward: it was proposed by the extend of the round before.
    """
    one_layer = batch * context * model.kv_elements() * itemsize
    levels = max(shape.steps - 1, 0)
    logits = 4 * batch
    head = model.head_weights(draft_vocabulary) * itemsize
    fc = AUX_LAYERS * model.hidden**2 * itemsize
    verified = logits * shape.width * model.vocabulary
    return Bytes(
        draft=levels * (head + one_layer + 2 * logits * shape.topk * draft_vocabulary),
        verify=model.target_weights() * itemsize + model.layers * one_layer + verified,
        tail=verified,
        extend=head + fc + one_layer + 2 * logits * draft_vocabulary,
    )


def plain_bytes(model: Decoder, batch: int, context: int, itemsize: int = 2) -> float:
    """Bytes of a step of plain decoding."""
    cache = model.layers * batch * context * model.kv_elements()
    return (model.target_weights() + cache) * itemsize + 2 * 4 * batch * model.vocabulary
