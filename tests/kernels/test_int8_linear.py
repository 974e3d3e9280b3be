"""The int8 linear layer: our kernels against an oracle in torch, torch's too against the layer that they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle_plugin.kernels import build, int8_linear, loader
from eagle_plugin.kernels.int8_linear import GROUP, Int8Weight

needs_avx2 = pytest.mark.skipif(not build.cpu_flags() >= build.AVX2, reason="this CPU has no AVX2")
needs_vnni = pytest.mark.skipif("avx512_vnni" not in build.cpu_flags(), reason="this CPU has no AVX-512 VNNI")


OURS = [
    pytest.param("int8_linear", marks=needs_vnni),
    pytest.param("int8_linear_avx2", marks=needs_avx2),
]


@pytest.fixture(params=[*OURS, "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel the layers of a test are packed for."""
    found = None if request.param == "torch" else loader.function(request.param)
    monkeypatch.setattr(int8_linear, "native_kernel", lambda: found)
    return request.param


def ours(test: Callable[..., None]) -> Callable[..., None]:
    """The test runs with each of our kernels that this CPU has."""
    return pytest.mark.parametrize("kernel", OURS, indirect=True)(test)


def layer(outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(outputs + inputs + rows)
    weight = (torch.randn(outputs, inputs, generator=gen) * 0.05).bfloat16()
    return weight, torch.randn(rows, inputs, generator=gen).bfloat16()


def packed_by(weight: Tensor) -> Int8Weight:
    packed = int8_linear.pack(weight)
    assert packed is not None
    return packed


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("rows", [1, 3, 4, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(8192, 576), (576, 1728), (96, 64)])
def test_it_is_the_layer_up_to_the_rounding_to_8_bits(kernel: str, rows: int, outputs: int, inputs: int) -> None:
    weight, x = layer(outputs, inputs, rows)
    packed = packed_by(weight)
    assert packed.serves(x)
    exact = x.float() @ weight.float().T
    assert error(packed.linear(x), exact) < 0.015
    wrong = packed._replace(scales=packed.scales.roll(1))  # control: scales of other rows are far off
    assert error(wrong.linear(x), exact) > 0.07


def oracle(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with x rounded to 8 bits by groups of a row; x [rows, K], weight [N, K] float32."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    top = padded.abs().amax(-1, keepdim=True)
    whole = torch.where(top > 0, padded * (torch.full_like(top, 127) / top), 0).round()
    return ((whole * (top / 127)).flatten(1)[:, : x.shape[1]].double() @ weight.double().T).float()


@ours
@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (17, 63), (64, 64), (200, 130), (1000, 576)])
def test_our_kernel_computes_what_the_oracle_computes(kernel: str, rows: int, outputs: int, inputs: int) -> None:
    weight, x = layer(outputs, inputs, rows)
    if rows > 1:
        x[-1] = 0
    packed = packed_by(weight)
    wanted = oracle(x, packed.rounded(inputs))
    found = packed.linear(x).float()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))
    if inputs >= GROUP:  # control: one weight of one output
        packed.values.view(-1)[5] ^= 64
        assert not torch.allclose(packed.linear(x).float(), wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))


@ours
def test_a_large_element_does_not_spoil_the_others(kernel: str) -> None:
    """Features of a target have elements that are hundreds of times larger than the rest."""
    weight, x = layer(256, 576, 4)
    x[:, 7], weight[:, 7] = 500, 0
    exact = x.float() @ weight.float().T
    packed = packed_by(weight)
    assert error(packed.linear(x), exact) < 0.36  # one group of nine is lost: a third of the root of squares
    by_row = (x.float() / (500 / 127)).round() * (500 / 127)  # control: one scale per row
    assert error(by_row @ packed.rounded(576).T, exact) > 0.9


@ours
def test_rows_with_a_stride_and_many_threads(kernel: str) -> None:
    weight, wide = layer(2048, 576, 60)
    packed, x = packed_by(weight), wide[::3]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = packed.linear(x.contiguous())
        torch.set_num_threads(4)
        out = torch.empty_like(alone)
        int8_linear.native_kernel()(x, *packed, out)  # type: ignore[misc]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, alone)


@needs_vnni
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_both_kernels_have_the_same_results(rows: int) -> None:
    """To the bit, so that a head drafts the same tokens on every CPU."""
    weight, x = layer(1000, 576, rows)
    packed, found = packed_by(weight), []
    for name in ("int8_linear", "int8_linear_avx2"):
        found.append(torch.empty(rows, 1000, dtype=torch.bfloat16))
        loader.function(name)(x, *packed, found[-1])  # type: ignore[misc]
    assert torch.equal(*found)


@pytest.mark.parametrize(("cpu", "name"), [("vnni", "int8_linear"), ("avx2", "int8_linear_avx2"), ("none", None)])
def test_the_kernel_of_each_cpu(cpu: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"has_int8_linear": lambda: cpu == "vnni", "int8_linear": len, "int8_linear_avx2": max}
    monkeypatch.setattr(loader, "function", functions.get)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.AVX2 if cpu != "none" else frozenset())
    assert int8_linear.native_kernel.__wrapped__() is functions.get(name or "")


def test_bias_and_leading_axes(kernel: str) -> None:
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()
    packed = packed_by(weight)
    x = torch.randn(2, 3, 64).bfloat16()
    torch.testing.assert_close(packed.linear(x, bias), torch.nn.functional.linear(x, weight, bias), rtol=0.05, atol=0.5)


def test_other_dtypes_and_large_batches_are_not_served(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "max_rows", lambda: 100)
    packed, most = packed_by(torch.randn(32, 64).bfloat16()), 16 if kernel == "torch" else 100
    assert int8_linear.pack(torch.randn(32, 64)) is None
    assert not packed.serves(torch.randn(2, 64))
    assert packed.serves(torch.randn(most, 64).bfloat16())
    assert not packed.serves(torch.randn(most + 1, 64).bfloat16())


def test_fewer_rows_where_the_cpu_has_tiles_and_any_with_avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, rows in (
        (build.AVX512, int8_linear.MAX_ROWS),
        (build.AVX512 | {"amx_tile"}, 16),
        (build.AVX2, int8_linear.ANY_ROWS),
    ):
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert int8_linear.max_rows.__wrapped__() == rows


@ours
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(2, 65).bfloat16()}, "weights has shape"),
        ({"x": torch.zeros(2, 64)}, "x is float32, wanted bfloat16"),
        ({"values": torch.zeros(2, 16, 16, 4)}, "weights is float32, wanted uint8"),
        ({"scales": torch.zeros(33)}, "scales has shape [33], wanted [32]"),
        ({"out": torch.zeros(3, 32).bfloat16()}, "out has shape [3, 32], wanted [2, *]"),
    ],
)
def test_wrong_arguments_are_refused(kernel: str, wrong: dict[str, Tensor], message: str) -> None:
    packed = packed_by(torch.randn(32, 64).bfloat16())
    arguments = {"x": torch.zeros(2, 64).bfloat16(), **packed._asdict(), "out": torch.zeros(2, 32).bfloat16()} | wrong
    with pytest.raises((ValueError, TypeError), match=message.replace("[", r"\[").replace("*", r"\*")):
        loader.function(kernel)(*arguments.values())  # type: ignore[misc]


@ours
def test_the_operator_is_the_layer_and_knows_its_shape(kernel: str) -> None:
    from torch._subclasses import FakeTensorMode

    from eagle_plugin.kernels import ops  # noqa: F401

    weight, x = layer(200, 130, 6)
    packed = packed_by(weight)
    operator = torch.ops.eagle_plugin.int8_linear
    assert torch.equal(operator(x.view(2, 3, 130), *packed), packed.linear(x).view(2, 3, 200))
    with FakeTensorMode() as mode:
        made = operator(*(mode.from_tensor(tensor) for tensor in (x, *packed)))
    assert made.shape == (6, 200) and made.dtype is torch.bfloat16
