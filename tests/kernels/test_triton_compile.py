"""Triton's tree attention compiled for GPUs that this machine need not have: shared memory, registers, instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from compiled_triton import SHARED, Compiled, compile_for  # noqa: E402

from eagle_plugin.kernels import triton_attention, triton_merge, triton_store, triton_tiles  # noqa: E402

STACK = 64  # bytes per thread: a few registers spilled in the widest tile; whole rows of a tile would be kilobytes
STACK_HOPPER = 512  # the fastest of sm_90 spills more
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOAT8 = {"fp8e4nv": 3, "fp8e5": 2}  # bits of the mantissa

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 leaves nothing to compile"),
]


def attend(cc: int, dtype: str, rows: int, dim: int, *, extras: bool, tile=None, stored: str | None = None) -> Compiled:
    """The kernel of `rows` query rows per key head, split; `extras`: with window, chunk, cap and sinks, not split;
    stored: of the cache, with scales."""
    tile = tile or triton_tiles.tile_for(rows, dim, SIZES[dtype], hopper=cc == 90 and not extras)
    types = {"q_ptr": f"*{dtype}"} | dict.fromkeys(("k_ptr", "v_ptr"), f"*{stored or dtype}")
    types |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32")
    types |= dict.fromkeys(("rows_ptr", "prefix_ptr", "ancestors_ptr"), "*i64") | {"table_ptr": "*i32"}
    types |= {"sinks_ptr": "*fp32", "lse_ptr": "*fp32", "inner": "fp32", "outer": "fp32"}
    types |= {"out_ptr": f"*{dtype}", "part_ptr": "*fp32"}
    block = triton.next_power_of_2(dim)
    constants = dict(GROUP=4, HEADS=32, DIM=dim, DIM_V=dim, BLOCK_D=block, BLOCK_DV=block)
    constants |= dict(BLOCK_M=tile.rows, BLOCK_N=tile.keys, SPLIT=not extras, UPCAST=False)
    constants |= dict(CAPPED=extras, WINDOWED=extras, CHUNKED=extras, SINKS=extras)
    constants |= dict(K_SCALED=stored is not None, V_SCALED=stored is not None)
    constants |= {} if stored else {"k_scale_ptr": None, "v_scale_ptr": None}
    constants |= {"lse_ptr": None, "part_ptr": None} if extras else {"sinks_ptr": None}
    kernel = triton_attention._attend
    return compile_for(cc, kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)


@pytest.fixture(autouse=True)
def _compile_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


TILES = [
    ("bf16", 1, 128, False),
    ("bf16", 32, 64, True),
    ("fp16", 24, 80, False),
    ("bf16", 256, 128, True),
    ("bf16", 64, 256, False),
    ("bf16", 256, 128, False),
    ("fp32", 32, 128, True),
]
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)")
# Every tile for one generation, and for each the two whose instructions are asked for: a narrow and a wide one.
CASES = [
    pytest.param(cc, *tile, marks=[] if cc == 90 or tile in TILES[2:4] else pytest.mark.matrix)
    for cc in (80, 90, 100)
    for tile in TILES
]


@pytest.mark.parametrize("cc, dtype, rows, dim, extras", CASES)
def test_a_tile_fits(cc: int, dtype: str, rows: int, dim: int, extras: bool) -> None:
    found = attend(cc, dtype, rows, dim, extras=extras)
    hopper, other = (triton_tiles.tile_for(rows, dim, SIZES[dtype], hopper=x) for x in (True, False))
    assert found.shared <= SHARED
    assert found.stack <= (STACK_HOPPER if cc == 90 and not extras and hopper != other else STACK)
    assert "cp.async" in found.ptx  # keys and values arrive while the block before them is computed
    if dtype != "fp32":
        wide = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[cc]
        assert (wide if rows >= 64 else "mma.sync") in found.ptx


@pytest.mark.parametrize("nodes", [16, 64])
def test_both_products_of_a_wide_tile_are_wgmma(nodes: int) -> None:
    """On Hopper trees of 16 and 64 nodes, of 4 query heads per key head, multiply by whole groups of warps alone."""
    tile = triton_tiles.tile_for(4 * nodes, 128, SIZES["bf16"], hopper=True)
    found = attend(90, "bf16", 4 * nodes, 128, extras=False)
    assert "mma.sync" not in found.ptx
    assert set(WGMMA.findall(found.ptx)) == {f"m64n{tile.keys}k16", "m64n128k16"}  # logits, and weighted values


def test_a_narrow_tile_is_seen() -> None:
    """Negative control: with 2 warps there is no group of 4."""
    found = attend(90, "bf16", 64, 128, extras=False, tile=triton_tiles.Tile(64, keys=64, warps=2, stages=2))
    assert "mma.sync" in found.ptx
    assert not WGMMA.findall(found.ptx)


@pytest.mark.parametrize(
    "cc, stored, extras",
    [
        (90, "fp8e4nv", False),
        pytest.param(89, "fp8e4nv", True, marks=pytest.mark.matrix),
        pytest.param(100, "fp8e4nv", False, marks=pytest.mark.matrix),
        pytest.param(80, "fp8e5", False, marks=pytest.mark.matrix),
    ],
)
def test_caches_of_8_bit_floats(cc: int, stored: str, extras: bool) -> None:
    found = attend(cc, "bf16", 64, 128, extras=extras, stored=stored)
    assert found.shared <= SHARED
    assert found.stack <= STACK_HOPPER


def test_what_triton_does_not_have_before_compute_capability_8_9() -> None:
    """The reason of a refusal by `runtime.gpu`."""
    with pytest.raises(triton.CompilationError, match="fp8e4nv not supported in this architecture"):
        attend(80, "bf16", 64, 128, extras=False, stored="fp8e4nv")


@pytest.mark.parametrize("cc", [90, pytest.param(80, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("stored", FLOAT8)
def test_what_is_written_to_such_caches(cc: int, stored: str) -> None:
    """By integer arithmetic, so that it is the same on every GPU; division is rounded as it is on a CPU."""
    types = dict.fromkeys(("k_ptr", "v_ptr"), "*bf16") | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8")
    types |= {"loc_ptr": "*i64", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    constants = dict(SIZE=1024, SIZE_V=1024, MANTISSA=FLOAT8[stored], MOST=448.0, K_SCALED=True, V_SCALED=True)
    found = compile_for(cc, triton_store._store, types, constants | {"BLOCK": triton_store.BLOCK})
    assert "cvt.rn.satfinite" not in found.ptx and "div.rn.f32" in found.ptx
    assert found.stack == 0


def test_too_large_a_tile_is_seen() -> None:
    """Negative control of both bounds."""
    found = attend(90, "bf16", 64, 256, extras=False, tile=triton_tiles.Tile(rows=64, keys=64, warps=4, stages=3))
    assert found.shared > SHARED
    assert found.stack > STACK
    wide = attend(90, "bf16", 256, 128, extras=False, tile=triton_tiles.Tile(256, keys=64, warps=4, stages=2))
    assert wide.stack > STACK_HOPPER


@pytest.mark.parametrize("cc", [80, 90, 100])
def test_the_merge_fits(cc: int) -> None:
    types = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "prefix_ptr": "*i64"}
    constants = dict(DIM_V=256, BLOCK_DV=256, SPLITS=triton_tiles.MAX_SPLITS, WINDOWED=True, CHUNKED=True)
    found = compile_for(cc, triton_merge._merge, types, constants | {"HEADS": 32, "TOGETHER": 8})
    assert found.shared <= SHARED
    assert found.stack <= STACK
