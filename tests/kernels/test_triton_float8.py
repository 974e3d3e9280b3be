"""Triton's kernels over caches of 8-bit floats against the torch oracles: on a GPU, or in Triton's interpreter.

`test_triton_interpreter.py` starts the second kind in a process of its own. Every bit pattern occurs but NaN.
"""

from __future__ import annotations

import os

import pytest
import torch
from attention_cases import oracle, tree_case
from float8_bits import random_bits
from torch import Tensor

from eagle_plugin.kernels.float8 import FLOAT8, quantised

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU; test_triton_interpreter.py runs these tests without one", allow_module_level=True)

from eagle_plugin.kernels import triton_attention, triton_store  # noqa: E402  the variable counts at the import
from eagle_plugin.kernels.triton_tiles import Splits  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.float16: dict(rtol=1 / 400, atol=2e-3),
    torch.bfloat16: dict(rtol=1 / 50, atol=1e-2),
}
PREFIXES, ROWS = [0, 37, 150], 9
SCALES = {torch.float8_e4m3fn: (0.004, 0.009), torch.float8_e5m2: (0.00003, 0.00007)}  # keys below 2, values below 4


def attend(stored: torch.dtype, dtype: torch.dtype, k_scale: float | None, v_scale: float | None, **options):
    """Found and wanted with these scales, the second by the oracle with those of SCALES."""
    shape = (3, 2, 2, (64, 80), dtype, 16)
    case, ancestors, tail, visible = tree_case(shape, PREFIXES, ROWS, 2, options.get("window", -1), stored=stored)
    q = case.randn(len(PREFIXES) * ROWS, case.heads, 64)
    out = torch.full((len(q), case.heads, 80), torch.nan, dtype=dtype, device=DEVICE)
    tensors = (q, case.k, case.v, case.table, case.rows, torch.tensor(PREFIXES), ancestors)
    given = [None if x is None else torch.tensor([x], device=DEVICE) for x in (k_scale, v_scale)]
    options["splits"] = Splits(options["splits"], even=options["splits"], least=1, longest=4096)
    triton_attention.tree_attention(
        *(x.to(DEVICE) for x in tensors), out, tail=tail, scale=0.3, k_scale=given[0], v_scale=given[1], **options
    )
    cap = options.get("logit_cap", 0.0)
    by = dict(zip(("k_scale", "v_scale"), map(torch.tensor, SCALES[stored]), strict=True))
    starts = [i * ROWS for i in range(len(PREFIXES))]
    return out.cpu(), oracle(
        case, q, visible, starts, torch.empty(out.shape, dtype=dtype), scale=0.3, logit_cap=cap, **by
    )


@pytest.mark.parametrize(
    "options", [{"splits": 1}, {"splits": 2, "window": 20}, {"splits": 1, "logit_cap": 3.0}], ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("stored", FLOAT8, ids=str)
def test_tree_attention(stored: torch.dtype, dtype: torch.dtype, options: dict) -> None:
    found, wanted = attend(stored, dtype, *SCALES[stored], **options)
    torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("scales", [(None, 0.009), (0.004, None), (0.009, 0.004)], ids=str)
def test_scales_that_are_ignored_or_exchanged_show(scales: tuple[float | None, float | None]) -> None:
    """Controls."""
    found, wanted = attend(torch.float8_e4m3fn, torch.float32, *scales, splits=1)
    assert not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)


def edges(stored: torch.dtype) -> Tensor:
    """Every number of the type, the middle between each two and its neighbours, and what is too large, float32."""
    bits = torch.arange(256, dtype=torch.uint8).view(stored)
    exact = bits[bits.float().isfinite()].float().sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(x)) for x in (-torch.inf, torch.inf)]
    most = torch.finfo(stored).max
    beyond = torch.tensor([most * 1.03, most * 1.1, -most * 2, 1e30, torch.inf, -torch.inf, 0.0, -0.0, 1e-30, -1e-42])
    return torch.cat([exact, middle, *near, beyond])


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("stored", FLOAT8, ids=str)
def test_what_is_written_is_the_oracles_bits(stored: torch.dtype, dtype: torch.dtype, scaled: bool) -> None:
    """Rows of a fused projection; a row whose slot is outside the cache is not written, NaN never is."""
    values = edges(stored).to(dtype)
    rows = -(-len(values) // 64)
    k = torch.nn.functional.pad(values, (0, rows * 64 - len(values))).view(rows, 2, 32)
    fused = torch.cat([k, -k, k], dim=1)
    k, v = fused[:, :2], fused[:, 2:4]
    gen = torch.Generator().manual_seed(0)
    both = random_bits(gen, rows + 5, 2, 64, dtype=stored).to(DEVICE)  # the keys and values of a head side by side
    caches = [part if scaled else part.contiguous() for part in both.split(32, dim=-1)]
    loc = torch.randperm(rows + 5, generator=gen)[:rows]
    loc[1:3] = torch.tensor([-1, rows + 5])
    written = torch.arange(rows) != 1
    written &= torch.arange(rows) != 2
    wanted = [cache.cpu().contiguous().view(torch.uint8).clone() for cache in caches]
    scales = (torch.tensor([0.7]), torch.tensor([3.3])) if scaled else (None, None)
    for cache, x, scale in zip(wanted, (k, v), scales, strict=True):
        cache[loc[written]] = quantised(x[written], scale, stored).view(torch.uint8)
    there = [None if scale is None else scale.to(DEVICE) for scale in scales]
    fused = fused.to(DEVICE)
    triton_store.store_float8(*caches, loc.to(DEVICE), fused[:, :2], fused[:, 2:4], *there)
    for found, want in zip(caches, wanted, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), want)
        assert bool(found.float().isfinite().all())
