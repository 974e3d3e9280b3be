"""The bfloat16 linear layer for few rows: our kernel against sums in float64, and a row's result in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_plugin.kernels import bf16_linear, build, loader

needs_kernel = pytest.mark.skipif("avx512_bf16" not in build.cpu_flags(), reason="this CPU has no AVX-512 BF16")


def layer(outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(outputs + inputs + rows)
    weight = torch.randn(outputs, inputs, generator=gen).bfloat16()
    return weight, torch.randn(rows, inputs, generator=gen).bfloat16(), torch.randn(outputs, generator=gen).bfloat16()


def computed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=torch.bfloat16)
    loader.function("bf16_linear")(x, weight, weight.new_empty(0) if bias is None else bias, out)  # type: ignore[misc]
    return out


def is_rounded_sum(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the result is that of float64, rounded, but for the last bit of a bfloat16 and the error of the sums."""
    wanted = x.double() @ weight.double().T
    most = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted, most = wanted + bias.double(), most + bias.double().abs()
    return bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + most * 2**-20).all())


@needs_kernel
@pytest.mark.parametrize("rows", [*range(1, 18), 31])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (17, 31), (16, 32), (200, 130), (1000, 576), (77, 1536)])
def test_it_is_the_layer_up_to_rounding(rows: int, outputs: int, inputs: int) -> None:
    weight, x, bias = layer(outputs, inputs, rows)
    assert is_rounded_sum(computed(x, weight), x, weight)
    assert is_rounded_sum(computed(x, weight, bias), x, weight, bias)
    wrong = weight.clone()  # control: one weight
    wrong[outputs // 2, inputs - 1] += 1
    assert not is_rounded_sum(computed(x, wrong), x, weight)


@needs_kernel
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 130), (1000, 576), (3, 2048)])
def test_a_row_has_the_same_result_in_every_batch(outputs: int, inputs: int) -> None:
    """To the bit: the layers of a tree's verification compute what those of plain decoding compute."""
    weight, x, bias = layer(outputs, inputs, 33)
    whole = computed(x, weight, bias)
    for first in range(33):
        for rows in (1, 2, 3, 4, 7, 8, 13):
            part = x[first : first + rows]
            assert torch.equal(computed(part, weight, bias), whole[first : first + rows])


@needs_kernel
def test_rows_with_a_stride_and_many_threads() -> None:
    weight, wide, _ = layer(2048, 576, 60)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = computed(wide[::3].contiguous(), weight)
        torch.set_num_threads(4)
        assert torch.equal(computed(wide[::3], weight), alone)
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_nan_and_infinity_stay() -> None:
    weight, x, _ = layer(40, 64, 9)
    x[4, 3], x[5, 3], weight[:, 3] = torch.nan, torch.inf, 1
    out = computed(x, weight)
    assert out[4].isnan().all() and (out[5] == torch.inf).all()
    assert out[[0, 1, 2, 3, 6, 7, 8]].isfinite().all()


@needs_kernel
def test_what_the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: loader.function("bf16_linear"))
    weight, x, _ = layer(8, 64, bf16_linear.MAX_ROWS + 1)
    assert bf16_linear.serves(x[:-1], weight)
    assert not bf16_linear.serves(x, weight)
    assert not bf16_linear.serves(x[:0], weight)
    assert not bf16_linear.serves(x[:2].float(), weight)
    assert not bf16_linear.serves(x[:2], weight.float())
    assert not bf16_linear.serves(x[:2, :8], weight.T)
    for served in (x[:6].view(2, 3, 64), x):
        out = bf16_linear.linear(served, weight)
        assert out.shape == (*served.shape[:-1], 8)
        torch.testing.assert_close(out, F.linear(served, weight), rtol=0.02, atol=0.02)


def test_not_where_the_engines_keep_the_weights_as_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"has_bf16_linear": lambda: True, "bf16_linear": len}
    monkeypatch.setattr(loader, "function", functions.get)
    for flags, found in (({"avx512_bf16"}, len), ({"avx512_bf16", "amx_tile"}, None)):
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert bf16_linear.native_kernel.__wrapped__() is found
    functions["has_bf16_linear"] = lambda: False
    assert bf16_linear.native_kernel.__wrapped__() is None


@needs_kernel
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(2, 65).bfloat16()}, "weight has shape [32, 64], wanted [*, 65]"),
        ({"x": torch.zeros(2, 64)}, "x is float32, wanted bfloat16"),
        ({"weight": torch.zeros(32, 64)}, "weight is float32, wanted bfloat16"),
        ({"bias": torch.zeros(33).bfloat16()}, "bias has shape [33], wanted [32]"),
        ({"out": torch.zeros(3, 32).bfloat16()}, "out has shape [3, 32], wanted [2, 32]"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Tensor], message: str) -> None:
    shapes = {"x": (2, 64), "weight": (32, 64), "bias": (32,), "out": (2, 32)}
    arguments = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()} | wrong
    with pytest.raises((ValueError, TypeError), match=message.replace("[", r"\[").replace("*", r"\*")):
        loader.function("bf16_linear")(*arguments.values())  # type: ignore[misc]
