"""On a GPU the layers of both models stay vLLM's, and nobody looks for the kernels of a CPU, or even builds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from eagle_plugin.kernels import bf16_linear
from eagle_plugin.vllm import draft_weights
from eagle_plugin.vllm.target_weights import use_bf16_kernel


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were looked for."""
    found: list[str] = []
    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: found.append("bf16"))
    monkeypatch.setattr(draft_weights, "native_kernel", lambda: found.append("int8"))
    return found


def layer_on(device: str, method: type) -> Any:
    layer: Any = nn.Linear(8, 8, dtype=torch.bfloat16, device=device)
    layer.quant_method = method()
    return layer


@pytest.mark.parametrize(("device", "looked"), [("meta", 0), ("cpu", 1)], ids=["no CPU tensors", "a CPU"])
def test_layers_of_the_target(device: str, looked: int, built: list[str]) -> None:
    config = SimpleNamespace(head_dtype=None, dtype=torch.bfloat16)
    model = nn.ModuleList([layer_on(device, UnquantizedLinearMethod)])
    assert use_bf16_kernel(model, config) == 0 and built == ["bf16"] * looked


@pytest.mark.parametrize(("device", "looked"), [("cuda", 0), ("cpu", 1)])
def test_layers_of_a_head_that_is_loaded(device: str, looked: int, built: list[str]) -> None:
    before = UnquantizedLinearMethod.process_weights_after_loading
    with draft_weights.int8_weights(device):
        assert UnquantizedLinearMethod.process_weights_after_loading is before
    assert built == ["int8"] * looked


@pytest.mark.parametrize(("device", "looked"), [("meta", 0), ("cpu", 1)], ids=["no CPU tensors", "a CPU"])
def test_the_output_layer_of_a_head(device: str, looked: int, built: list[str]) -> None:
    head = SimpleNamespace(
        lm_head=layer_on(device, UnquantizedEmbeddingMethod), logits_processor=SimpleNamespace(head_dtype=None)
    )
    draft_weights.use_int8_output(head)
    assert built == ["int8"] * looked
