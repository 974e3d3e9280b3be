"""Triton's tree attention against the torch oracle: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1.

`test_triton_interpreter.py` starts the second kind in a process of its own. Slots that no row may see hold NaN.
Tolerances beside one rounding of the result: the weights are rounded to the cache's dtype before they meet the values.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from attention_cases import Case, oracle, tree_case
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU; test_triton_interpreter.py runs these tests without one", allow_module_level=True)

from eagle_plugin.kernels import triton_attention, triton_tiles  # noqa: E402  the variable counts when Triton is imported
from eagle_plugin.kernels.triton_tiles import Splits  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.float16: dict(rtol=1 / 400, atol=2e-3),
    torch.bfloat16: dict(rtol=1 / 50, atol=1e-2),
}
DTYPES = list(TOLERANCE)
# nodes, further tail keys, query heads per key head, (head_dim, of values), (window, chunk), logit cap, sinks, splits,
# page size
SHAPES = {
    "decode": (1, 0, 1, (64, 64), (-1, 0), 0.0, False, 1, 1),
    "decode, split": (1, 0, 4, (128, 128), (-1, 0), 0.0, True, 8, 16),
    "odd head_dim": (8, 3, 3, (80, 80), (-1, 0), 3.0, True, 4, 16),
    "two dims": (5, 0, 1, (80, 48), (0, 0), 3.0, False, 1, 1),
    "several tiles": (64, 0, 4, (128, 128), (70, 0), 0.0, True, 2, 16),
    "wide group": (17, 9, 8, (64, 64), (5, 0), 0.0, False, 8, 1),
    "full ancestors": (33, 31, 3, (64, 64), (-1, 0), 0.0, False, 2, 16),
    "chunks that begin inside the trees": (33, 8, 2, (64, 64), (-1, 39), 0.0, True, 4, 16),
    "short chunks and a window": (64, 0, 4, (64, 64), (2, 3), 0.0, False, 2, 1),
}


def run(case: Case, q: Tensor, prefixes: list[int], ancestors: Tensor, tail: int, **options) -> Tensor:
    out = torch.full((*q.shape[:2], case.v.shape[2]), torch.nan, dtype=q.dtype, device=DEVICE)
    args = (q, case.k, case.v, case.table, case.rows, torch.tensor(prefixes, dtype=torch.int64), ancestors)
    sinks = options.pop("sinks", None)
    sinks = None if sinks is None else sinks.to(DEVICE)
    if isinstance(splits := options.pop("splits", 1), int):
        splits = Splits(splits, even=splits, least=1, longest=4096)
    triton_attention.tree_attention(
        *(x.to(DEVICE) for x in args), out, tail=tail, **{"scale": 0.3, "sinks": sinks, "splits": splits} | options
    )
    return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tree_attention(shape: tuple, dtype: torch.dtype) -> None:
    R, extra, group, dims, (window, chunk), cap, sinks, splits, page = shape
    prefixes = [0, 37, 270]
    case, ancestors, tail, visible = tree_case((R, 2, group, dims, dtype, page), prefixes, R, extra, window, chunk)
    q = case.randn(len(prefixes) * R, case.heads, dims[0])
    option = {"logit_cap": cap, "sinks": case.sinks if sinks else None}
    found = run(case, q, prefixes, ancestors, tail, window=window, chunk=chunk, splits=splits, **option)
    wanted = oracle(case, q, visible, [i * R for i in range(3)], torch.empty_like(found), scale=0.3, **option)
    torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


def plain_case(prefix: int, R: int, window: int = -1) -> tuple[Case, Tensor, Tensor]:
    case, ancestors, _, _ = tree_case((0, 2, 2, (64, 64), torch.float32, 1), [prefix], R, 0, window)
    return case, ancestors, case.randn(R, case.heads, 64)


@pytest.mark.parametrize("splits", [1, 4])
def test_one_wrong_ancestor_bit_changes_that_row_alone(splits: int) -> None:
    case, ancestors, q = plain_case(150, 8)
    ancestors = ancestors | 1  # every row sees the root
    right = run(case, q, [150], ancestors, 8, splits=splits)
    ancestors[0, 3] ^= 1
    wrong = run(case, q, [150], ancestors, 8, splits=splits)
    assert (right != wrong).flatten(1).any(dim=1).tolist() == [i == 3 for i in range(8)]


def test_no_bitmask_is_shifted_by_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may have more keys than a bitmask has bits. The tail is 64 keys, and bit 63 makes a bitmask negative.

    A shift by 64 or more has no defined result on a GPU. NumPy defines one, so the interpreter is told to refuse it.
    """
    case, ancestors, tail, (seen,) = tree_case((3, 1, 1, (64, 64), torch.float32, 1), [40], 63, 1, -1)
    ancestors[:, ::2] |= -(2**63)
    seen[::2, 40 + 63] = True
    case.write(0, seen)
    q = case.randn(63, case.heads, 64)
    monkeypatch.setattr(triton_tiles, "tile_for", lambda *_: triton_tiles.Tile(64, keys=128, warps=4, stages=1))
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        shift = InterpreterBuilder.create_ashr

        def refuse(self, bits, by):
            assert int(by.data.max()) < 8 * bits.data.itemsize, "a shift by the width of the number or more"
            return shift(self, bits, by)

        monkeypatch.setattr(InterpreterBuilder, "create_ashr", refuse)
    found = run(case, q, [40], ancestors, tail)
    torch.testing.assert_close(found, oracle(case, q, [seen], [0], torch.empty_like(found), scale=0.3))


def test_a_window_one_wider_shows() -> None:
    case, ancestors, q = plain_case(90, 4)
    found = {window: run(case, q, [90], ancestors, 4, window=window) for window in (20, 21)}
    assert bool((found[20] != found[21]).flatten(1).any(dim=1).all())


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_sees_nothing_is_zero(splits: int) -> None:
    case, ancestors, q = plain_case(0, 4)
    ancestors[0, 2] = 0
    found = run(case, q, [0], ancestors, 4, splits=splits)
    assert bool((found[2] == 0).all())
    assert bool(found.isfinite().all())


def test_strides_of_a_fused_projection_and_of_interleaved_caches() -> None:
    case, ancestors, q = plain_case(70, 4)
    wide = torch.cat([q, q + 1, q], dim=1)
    both = torch.stack([case.k, case.v], dim=1).to(DEVICE)  # [slots, 2, heads, dim]
    wanted = run(case, q, [70], ancestors, 4, splits=2)
    case.k, case.v = both[:, 0], both[:, 1]
    assert torch.equal(run(case, wide[:, : q.shape[1]], [70], ancestors, 4, splits=2), wanted)


def steps_per_program(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How many blocks of keys each program of the interpreter reads, while tests run."""
    from triton.runtime.interpreter import interpreter_builder

    steps: Counter[tuple[int, ...]] = Counter()
    healthy = triton_attention._add_keys

    def counted(*arguments: Any) -> Any:
        steps[tuple(interpreter_builder.grid_idx)] += 1
        return healthy(*arguments)

    monkeypatch.setattr(triton_attention, "_add_keys", counted)
    return steps


@pytest.mark.parametrize("window", [-1, 300])
def test_one_long_request_of_many_is_read_by_several_programs(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch that fills the device; of the short ones one program has a stretch, and the others do nothing."""
    prefixes, R, dims = [700, *[20] * 31], 2, (16, 16)
    case, ancestors, tail, visible = tree_case((R, 1, 2, dims, torch.float32, 1), prefixes, R, 0, window)
    q = case.randn(len(prefixes) * R, case.heads, dims[0])
    splits = Splits(8, even=1, least=128, longest=96)
    steps = steps_per_program(monkeypatch) if INTERPRETED else {}
    found = run(case, q, prefixes, ancestors, tail, window=window, splits=splits)
    wanted = oracle(case, q, visible, [i * R for i in range(32)], torch.empty_like(found), scale=0.3)
    torch.testing.assert_close(found, wanted, **TOLERANCE[torch.float32])
    if INTERPRETED:
        block, stretches = triton_tiles.tile_for(2 * R, 16, 4, hopper=False).keys, 8 if window < 0 else 4
        assert {place[0] for place in steps if place[2] == 0} == set(range(stretches))
        assert {place[0] for place in steps if place[2] > 0} == {0}
        assert max(steps.values()) <= 96 // block + 1  # and the tail


def test_no_rows() -> None:
    case, ancestors, q = plain_case(5, 2)
    assert run(case, q[:0], [5], ancestors[:, :0], 2).shape == (0, 4, 64)
