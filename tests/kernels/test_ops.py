"""The torch operators: true schemas, and fakes with the shapes of the real thing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_plugin.kernels import int8_linear, ops

OPS = torch.ops.eagle_plugin


def cases() -> dict[str, tuple[Tensor | None, ...]]:
    gen = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=gen).bfloat16() for n in (3, 32))
    packed = int8_linear.pack(weight)
    assert packed is not None
    return {"bf16_linear": (x, weight, None), "int8_linear": (x, *packed)}


@pytest.mark.parametrize("name", cases())
def test_schema_and_fake_agree_with_the_kernel(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name), cases()[name], test_utils=("test_schema", "test_faketensor"))


def test_every_operator_has_a_case() -> None:
    registered = {name.split("::")[1].split(".")[0] for name in ops.LIBRARY._op_defs}
    assert registered == set(cases())
