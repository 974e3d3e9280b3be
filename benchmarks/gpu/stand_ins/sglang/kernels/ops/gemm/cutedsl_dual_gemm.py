"""In place of SGLang's kernel for Blackwell, which needs CUTLASS: on other GPUs SGLang does not use it."""

from __future__ import annotations

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """The modes that SGLang names."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(*_: object) -> bool:
    """What the kernel says on any GPU but Blackwell."""
    return False
