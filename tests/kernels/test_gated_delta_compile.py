"""Triton's gated delta nets compiled for GPUs that this machine need not have: shared memory and registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from compiled_triton import SHARED, Compiled, compile_for  # noqa: E402

from eagle_plugin.kernels import triton_gated_delta as kernels  # noqa: E402

STACK = 64  # bytes per thread: a few spilled registers
HEADS = dict(HK=16, HV=32, K=128, V=128)  # Qwen3-Next-80B-A3B
CHANNELS = 2 * 16 * 128 + 32 * 128
INTEGERS = dict.fromkeys(("slots_ptr", "lengths_ptr", "windows_ptr", "last_ptr"), "*i64") | {"seen_ptr": "*u8"}
FLOATS = dict.fromkeys(("decays_ptr", "keys_ptr", "updates_ptr", "a_log_ptr"), "*fp32") | {"scale": "fp32"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 leaves nothing to compile"),
]


@pytest.fixture(autouse=True)
def _compile_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(cc: int, kernel: Any, dtype: str, state: str, constants: dict[str, Any], warps: int = 4) -> Compiled:
    """A kernel over projections and convolutions of dtype, and states of another one."""
    types = INTEGERS | FLOATS | {"state_ptr": f"*{state}"}
    for name in ("x", "past", "weight", "inputs", "mixed", "a", "b", "dt_bias", "out"):
        types[f"{name}_ptr"] = f"*{dtype}"
    if "BIAS" in constants:
        constants = constants | {"bias_ptr": None}
    return compile_for(cc, kernel, types, constants, num_warps=warps)


def rule(cc: int, state: str, width: int, tile: tuple[int, int]) -> Compiled:
    constants = HEADS | dict(BLOCK_W=max(16, width), BLOCK_K=kernels.KEYS, BLOCK_V=tile[0], LENGTHS=True)
    return compiled(cc, kernels._delta_rule, "bf16", state, constants, tile[1])


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.matrix), 32, 64])
@pytest.mark.parametrize("state", ["fp32", pytest.param("bf16", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("cc", [80, 90, pytest.param(100, marks=pytest.mark.matrix)])
def test_the_rule_fits(cc: int, state: str, width: int) -> None:
    found = rule(cc, state, width, kernels.tile_for(width))
    assert found.shared <= SHARED and found.stack <= STACK
    assert "mma" not in found.ptx  # tensor cores would round float32 to TF32


def test_too_wide_a_program_is_seen() -> None:
    assert rule(80, "fp32", 64, (32, 8)).stack > STACK


@pytest.mark.parametrize("cc", [80, 90, pytest.param(100, marks=pytest.mark.matrix)])
def test_convolution_and_commits_fit(cc: int) -> None:
    convolved = dict(CHANNELS=CHANNELS, TAPS=4, BLOCK=kernels.CHANNELS, LENGTHS=True)
    committed = HEADS | dict(BLOCK_K=128, BLOCK_V=kernels.VALUES, LENGTHS=True)
    for kernel, constants in (
        (kernels._convolve, convolved | {"BIAS": False}),
        (kernels._commit_pasts, convolved | {"BLOCK_T": 4}),
        (kernels._commit_states, committed),
    ):
        found = compiled(cc, kernel, "bf16", "fp32", constants)
        assert found.shared <= SHARED and found.stack <= STACK
