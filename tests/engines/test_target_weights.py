"""Which layers of a target get our linear layer, and what else they do as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle_plugin.kernels import bf16_linear, int8_linear
from eagle_plugin.kernels.bf16_linear import Kernel
from eagle_plugin.runtime.draft_weights import int8_copy
from eagle_plugin.runtime.target_weights import Bf16Method, use_bf16_kernel


class EngineMethod:
    """Like an engine's method of layers without quantization."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.rows.append(len(x))
        return nn.functional.linear(x, layer.weight, bias)

    def embedding(self, layer: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, layer.weight)


class OtherMethod(EngineMethod):
    """Of another kind, like a quantized layer's."""


class Layer(nn.Module):
    def __init__(self, method: EngineMethod, dtype: torch.dtype = torch.bfloat16, axes: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn([32] * (axes - 1) + [64]).to(dtype), requires_grad=False)
        self.quant_method: Any = method


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that came to the kernel; on a CPU without it torch computes instead."""
    seen: list[int] = []

    def stand_in(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        seen.append(len(x))
        out.copy_(nn.functional.linear(x, weight, bias if len(bias) else None))

    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: Kernel(stand_in, bf16_linear.MAX_ROWS))
    return seen


def test_only_bfloat16_layers_of_the_named_methods_change() -> None:
    kinds = [
        Layer(EngineMethod()),
        Layer(OtherMethod()),
        Layer(EngineMethod(), torch.float32),
        Layer(EngineMethod(), axes=3),
    ]
    before = [layer.quant_method for layer in kinds]
    assert use_bf16_kernel(nn.Sequential(*kinds, nn.LayerNorm(8)), (EngineMethod,)) == 1
    assert isinstance(kinds[0].quant_method, Bf16Method) and kinds[0].quant_method.original is before[0]
    assert [layer.quant_method for layer in kinds[1:]] == before[1:]
    assert use_bf16_kernel(nn.Sequential(*kinds), (EngineMethod,)) == 0  # once is enough
    packed = Layer(EngineMethod())  # as large as before, in another order
    assert use_bf16_kernel(nn.Sequential(packed), (EngineMethod,), lambda layer: layer is packed) == 0


def test_few_rows_go_to_the_kernel_and_the_rest_to_the_engine(kernel: list[int]) -> None:
    method, most = EngineMethod(), bf16_linear.MAX_ROWS
    layer, bias = Layer(method), torch.randn(32).bfloat16()
    use_bf16_kernel(layer, (EngineMethod,))
    for rows in (1, most, most + 1, 300):
        x = torch.randn(rows, 64).bfloat16()
        for b in (None, bias):
            torch.testing.assert_close(layer.quant_method.apply(layer, x, b), nn.functional.linear(x, layer.weight, b))
    assert kernel == [1, 1, most, most] and method.rows == [most + 1] * 2 + [300] * 2
    ids = torch.tensor([3, 5])
    assert torch.equal(layer.quant_method.embedding(layer, ids), layer.weight[ids])
    layer.weight.data.mul_(2)  # weights that are exchanged in place
    x = torch.ones(2, 64).bfloat16()
    torch.testing.assert_close(layer.quant_method.apply(layer, x), nn.functional.linear(x, layer.weight))


def test_compiled_graphs_take_the_operator_of_a_kernel_for_any_rows(
    kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, in_graphs in ((bf16_linear.MAX_ROWS, False), (bf16_linear.ANY_ROWS, True)):
        multiply = bf16_linear.native_kernel().multiply
        monkeypatch.setattr(bf16_linear, "native_kernel", lambda f=multiply, most=most: Kernel(f, most))
        method = EngineMethod()
        layer = Layer(method)
        use_bf16_kernel(layer, (EngineMethod,))
        run = torch.compile(lambda x, layer=layer: layer.quant_method.apply(layer, x), fullgraph=True, backend="eager")
        x = torch.randn(3, 64).bfloat16()
        kernel.clear()
        torch.testing.assert_close(run(x), nn.functional.linear(x, layer.weight))
        assert kernel == [3] * in_graphs


def test_the_switch_and_a_cpu_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(EngineMethod())
    monkeypatch.setenv("EAGLE_TARGET_LINEAR", "0")
    assert use_bf16_kernel(layer, (EngineMethod,)) == 0
    monkeypatch.delenv("EAGLE_TARGET_LINEAR")
    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: None)
    assert use_bf16_kernel(layer, (EngineMethod,)) == 0
    assert type(layer.quant_method) is EngineMethod


def test_a_gpu_server_does_not_look_for_the_kernels_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have to be built first, which takes half a minute."""
    built: list[str] = []
    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: built.append("bf16"))
    monkeypatch.setattr(int8_linear, "native_kernel", lambda: built.append("int8"))
    layer = Layer(EngineMethod()).to("meta")  # no CPU tensor, as on a GPU
    assert use_bf16_kernel(layer, (EngineMethod,)) == 0 and int8_copy(layer.weight) is None and built == []
    assert use_bf16_kernel(layer.to_empty(device="cpu"), (EngineMethod,)) == 0 and built == ["bf16"]
