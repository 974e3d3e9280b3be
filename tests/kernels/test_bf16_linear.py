"""The bfloat16 linear layer: our kernels against sums in float64, and a row's result in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_plugin.kernels import bf16_linear, build, loader
from eagle_plugin.kernels.bf16_linear import Kernel

needs_bf16 = pytest.mark.skipif("avx512_bf16" not in build.cpu_flags(), reason="this CPU has no AVX-512 BF16")


@pytest.fixture(params=[pytest.param("bf16_linear", marks=needs_bf16), "bf16_linear_fma"])
def kernel(request: pytest.FixtureRequest) -> str:
    """The kernel of a test; that of AVX2 runs on other CPUs too."""
    return request.param


def layer(outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(outputs + inputs + rows)
    weight = torch.randn(outputs, inputs, generator=gen).bfloat16()
    return weight, torch.randn(rows, inputs, generator=gen).bfloat16(), torch.randn(outputs, generator=gen).bfloat16()


def computed(kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=torch.bfloat16)
    loader.function(kernel)(x, weight, weight.new_empty(0) if bias is None else bias, out)  # type: ignore[misc]
    return out


def is_rounded_sum(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the result is that of float64, rounded, but for the last bit of a bfloat16 and the error of the sums."""
    wanted = x.double() @ weight.double().T
    most = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted, most = wanted + bias.double(), most + bias.double().abs()
    return bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + most * 2**-20).all())


@pytest.mark.parametrize("rows", [*range(1, 18), 31, 259])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (17, 31), (16, 32), (200, 130), (1000, 576), (77, 1536)])
def test_it_is_the_layer_up_to_rounding(kernel: str, rows: int, outputs: int, inputs: int) -> None:
    weight, x, bias = layer(outputs, inputs, rows)
    assert is_rounded_sum(computed(kernel, x, weight), x, weight)
    assert is_rounded_sum(computed(kernel, x, weight, bias), x, weight, bias)
    wrong = weight.clone()  # control: one weight
    wrong[outputs // 2, inputs - 1] += 1
    assert not is_rounded_sum(computed(kernel, x, wrong), x, weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(200, 130), (1000, 576), (3, 2048)])
def test_a_row_has_the_same_result_in_every_batch(kernel: str, outputs: int, inputs: int) -> None:
    """To the bit: the layers of a tree's verification compute what those of plain decoding compute."""
    weight, x, bias = layer(outputs, inputs, 33)
    whole = computed(kernel, x, weight, bias)
    for first in range(33):
        for rows in (1, 2, 3, 4, 7, 8, 13):
            part = x[first : first + rows]
            assert torch.equal(computed(kernel, part, weight, bias), whole[first : first + rows])


def test_rows_with_a_stride_and_many_threads(kernel: str) -> None:
    weight, wide, _ = layer(2048, 576, 60)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = computed(kernel, wide[::3].contiguous(), weight)
        torch.set_num_threads(4)
        assert torch.equal(computed(kernel, wide[::3], weight), alone)
    finally:
        torch.set_num_threads(before)


def test_nan_and_infinity_stay(kernel: str) -> None:
    weight, x, _ = layer(40, 64, 9)
    x[4, 3], x[5, 3], weight[:, 3] = torch.nan, torch.inf, 1
    out = computed(kernel, x, weight)
    assert out[4].isnan().all() and (out[5] == torch.inf).all()
    assert out[[0, 1, 2, 3, 6, 7, 8]].isfinite().all()


def test_what_the_kernel_serves(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 6
    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: Kernel(loader.function(kernel), most))
    weight, x, _ = layer(8, 64, most + 1)
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


def test_the_kernel_of_each_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows where torch has tiles; none where nothing was measured."""
    functions = {"bf16_linear": len, "bf16_linear_fma": max}
    monkeypatch.setattr(loader, "function", functions.get)
    pairs, fma = Kernel(len, bf16_linear.MAX_ROWS), Kernel(max, bf16_linear.ANY_ROWS)
    with_pairs = build.AVX512 | {"avx512_bf16"}
    for flags, has_pairs, found in (
        (with_pairs, True, pairs),
        (with_pairs | {"amx_tile"}, True, Kernel(len, bf16_linear.MAX_ROWS_AMX)),
        (build.AVX512, False, None),
        (build.AVX2, False, fma),
        ({"sse4_2"}, False, None),
    ):
        functions["has_bf16_linear"] = lambda has_pairs=has_pairs: has_pairs
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert bf16_linear.native_kernel.__wrapped__() == found
    functions.clear()  # no native library
    assert bf16_linear.native_kernel.__wrapped__() is None


def test_the_operator_is_the_layer_and_knows_its_shape() -> None:
    from torch._subclasses import FakeTensorMode

    from eagle_plugin.kernels import ops  # noqa: F401

    weight, x, bias = layer(200, 130, 6)
    operator = torch.ops.eagle_plugin.bf16_linear
    for b in (bias, None):
        assert torch.equal(operator(x.view(2, 3, 130), weight, b), bf16_linear.linear(x, weight, b).view(2, 3, 200))
    with FakeTensorMode() as mode:
        made = operator(*(mode.from_tensor(tensor) for tensor in (x, weight, bias)))
    assert made.shape == (6, 200) and made.dtype is torch.bfloat16


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
def test_wrong_arguments_are_refused(kernel: str, wrong: dict[str, Tensor], message: str) -> None:
    shapes = {"x": (2, 64), "weight": (32, 64), "bias": (32,), "out": (2, 32)}
    arguments = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()} | wrong
    with pytest.raises((ValueError, TypeError), match=message.replace("[", r"\[").replace("*", r"\*")):
        loader.function(kernel)(*arguments.values())  # type: ignore[misc]
