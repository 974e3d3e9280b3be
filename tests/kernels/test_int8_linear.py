"""The int8 linear layer against the bfloat16 layer that it replaces."""

from __future__ import annotations

import pytest
import torch

from eagle_plugin.kernels import int8_linear


@pytest.mark.parametrize("rows", [1, 3, 4, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(8192, 576), (576, 1728), (96, 64)])
def test_it_is_the_layer_up_to_the_rounding_of_its_weights(rows, outputs, inputs):
    gen = torch.Generator().manual_seed(rows)
    weight = (torch.randn(outputs, inputs, generator=gen) * 0.05).bfloat16()
    x = torch.randn(rows, inputs, generator=gen).bfloat16()
    packed = int8_linear.pack(weight)
    assert packed is not None and int8_linear.serves(x)
    exact = x.float() @ weight.float().T
    error = (packed.linear(x).float() - exact).norm() / exact.norm()
    assert error < 0.015
    wrong = packed._replace(scales=packed.scales.roll(1))  # control: scales of other rows are far off
    assert (wrong.linear(x).float() - exact).norm() / exact.norm() > 5 * error


def test_bias_and_leading_axes():
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()
    packed = int8_linear.pack(weight)
    x = torch.randn(2, 3, 64).bfloat16()
    torch.testing.assert_close(packed.linear(x, bias), torch.nn.functional.linear(x, weight, bias), rtol=0.05, atol=0.5)


def test_other_dtypes_and_large_batches_are_not_served():
    assert int8_linear.pack(torch.randn(32, 64)) is None
    assert not int8_linear.serves(torch.randn(2, 64))
    assert not int8_linear.serves(torch.randn(17, 64).bfloat16())
