"""The arithmetic of benchmarks/roofline.py: bytes of a round."""

from __future__ import annotations

import pytest

from benchmarks.roofline import H100, H200, LLAMA_8B, plain_bytes, round_bytes
from eagle_plugin.core.shape import Shape


def test_weights_of_llama() -> None:
    """8.03 billion parameters, of which the embedding is not read."""
    embedding = LLAMA_8B.hidden * LLAMA_8B.vocabulary
    assert LLAMA_8B.target_weights() + embedding == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_8B.head_weights(32000) == pytest.approx(0.37e9, rel=0.1)
    assert LLAMA_8B.kv_elements() * 2 * LLAMA_8B.layers == 131072  # bytes of a token's keys and values in bf16


def test_bytes_of_a_round() -> None:
    shape = Shape(3, 4, 16)
    one, eight = (round_bytes(LLAMA_8B, shape, batch, 1000) for batch in (1, 8))
    cache = 1000 * 131072
    assert one.verify == LLAMA_8B.target_weights() * 2 + cache + one.tail
    assert one.tail == 4 * 16 * 128256
    assert eight.verify - one.verify == 7 * (cache + one.tail)
    # Two levels read the head; without levels after the first there is no draft forward.
    assert one.draft == pytest.approx(2 * LLAMA_8B.head_weights(32000) * 2, rel=0.02)
    assert round_bytes(LLAMA_8B, Shape(1, 4, 5), 1, 1000).draft == 0
    assert one.extend > one.draft / 2  # fc is read too
    assert plain_bytes(LLAMA_8B, 1, 1000) == pytest.approx(LLAMA_8B.target_weights() * 2 + cache, rel=1e-3)
    assert H200.bandwidth > H100.bandwidth
