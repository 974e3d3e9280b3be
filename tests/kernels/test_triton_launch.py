"""What happens on the host before Triton's tree attention is launched: on fake CUDA tensors, which have no contents, so
that anything that would wait for the device raises."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

pytest.importorskip("triton")

from eagle_plugin.kernels import attention, triton_attention, triton_merge, triton_tiles  # noqa: E402


class Launches:
    """Stands in for a Triton kernel and keeps the grid and the arguments of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda *args, **constants: self.constants.append(constants)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Launches, Launches]:
    found = Launches(), Launches()
    monkeypatch.setattr(triton_attention, "_attend", found[0])
    monkeypatch.setattr(triton_merge, "_merge", found[1])
    monkeypatch.setattr(triton_tiles, "_device", lambda index: triton_tiles.Device(132, hopper=True))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: FakeTensorMode())  # any context that does nothing
    return found


def arguments(b: int, R: int, width: int, heads: tuple[int, int] = (32, 8), dim: int = 128) -> dict[str, Any]:
    cuda = dict(device="cuda")
    cache = torch.empty(4 * width, heads[1], dim, dtype=torch.bfloat16, **cuda)
    return dict(
        q=torch.empty(b * R, heads[0], dim, dtype=torch.bfloat16, **cuda),
        k_cache=cache,
        v_cache=cache,
        slot_table=torch.empty(64, width, dtype=torch.int32, **cuda),
        rows=torch.empty(b, dtype=torch.int64, **cuda),
        prefix_lens=torch.empty(b, dtype=torch.int64, **cuda),
        ancestors=torch.empty(b, R, dtype=torch.int64, **cuda),
        tail=R,
        scale=0.1,
    )


def test_a_gpu_call_launches_without_reading_a_tensor(kernels: tuple[Launches, Launches]) -> None:
    with FakeTensorMode():
        out = attention.tree_attention(**arguments(2, 16, 8192))
        assert (out.shape, out.device.type) == ((32, 32, 128), "cuda")
        assert kernels[0].grids == [(16, 8, 2)]
        assert kernels[1].grids == [(32, 32)]
        assert kernels[0].constants[0]["BLOCK_M"] == 64
        assert kernels[0].constants[0]["SPLIT"]


def test_a_full_batch_of_short_requests_is_not_split(kernels: tuple[Launches, Launches]) -> None:
    with FakeTensorMode():
        attention.tree_attention(**arguments(64, 64, 4096))
    assert kernels[0].grids == [(1, 8 * 2, 64)]
    assert kernels[1].grids == []


def test_a_full_batch_in_which_one_request_may_be_long(kernels: tuple[Launches, Launches]) -> None:
    """The merge has fewer programs than rows and heads: it has nothing to do for most of them."""
    with FakeTensorMode():
        attention.tree_attention(**arguments(32, 16, 131072))
    assert kernels[0].grids == [(8, 8, 32)]
    assert kernels[1].grids == [(32 * 16, 4)]
    assert kernels[1].constants[0]["SPLITS"] == 8


@pytest.mark.parametrize("b", [16, 32, 64, 128, 256, 512])
def test_few_programs_of_a_full_batch_find_no_work(kernels: tuple[Launches, Launches], b: int) -> None:
    """Plain rounds of a model with a long context: a long request is split, at the cost of few programs."""
    with FakeTensorMode():
        attention.tree_attention(**arguments(b, 1, 131072))
    [(splits, programs, requests)] = kernels[0].grids
    assert (programs, requests) == (8, b)
    assert splits >= 2
    assert splits * programs * requests <= max(16 * 132, 2 * programs * requests)


def test_a_layer_with_a_window_is_split_by_the_keys_that_a_row_sees(kernels: tuple[Launches, Launches]) -> None:
    """Neither stretches without keys nor a merge, where a window or a chunk is shorter than a stretch."""
    with FakeTensorMode():
        for limit in (dict(window=127), dict(chunk=128), dict(window=1023), dict()):
            attention.tree_attention(**arguments(4, 16, 131072) | limit)
    splits = [grid[0] for grid in kernels[0].grids]
    assert splits[:2] == [1, 1] and 1 < splits[2] < splits[3]
    assert len(kernels[1].grids) == 2


def test_the_width_of_a_table_needs_no_kernel_of_its_own() -> None:
    """Slot tables of eager steps are as wide as the longest request of the step."""
    source = inspect.getsource(triton_attention)
    (call,) = re.findall(r"@triton\.jit\(do_not_specialize=(\[.*?\])\)\ndef _attend", source)
    assert "table_stride" in ast.literal_eval(call)


def test_the_torch_path_does_read_tensors(kernels: tuple[Launches, Launches], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of fake tensors, and the way out for a head_dim that has no tile."""
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException):
            attention.tree_attention(**arguments(2, 16, 512, dim=320))
        monkeypatch.setattr(attention, "_triton", lambda: None)
        with pytest.raises(DataDependentOutputException):
            attention.tree_attention(**arguments(2, 16, 512))
    assert kernels[0].grids == []


def test_what_was_right_is_not_checked_again(
    kernels: tuple[Launches, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(attention, "_checked", set())
    monkeypatch.setattr(attention, "MOST_CHECKED", 2)
    healthy = attention.check_all

    def counted(*wanted: Any, **sizes: int) -> dict[str, int]:
        checked.append(wanted)
        return healthy(*wanted, **sizes)

    monkeypatch.setattr(attention, "check_all", counted)
    with FakeTensorMode():
        good = arguments(2, 8, 512)
        attention.tree_attention(**good)
        once = len(checked)
        attention.tree_attention(**good)
        assert len(checked) == once > 0
        for _ in range(2):
            with pytest.raises(TypeError, match="rows is int32, wanted int64"):
                attention.tree_attention(**good | {"rows": good["rows"].int()})
        for width in (600, 700):
            attention.tree_attention(**arguments(2, 8, width))
    assert len(attention._checked) == 1  # of few shapes at a time


def test_argument_checks(kernels: tuple[Launches, Launches]) -> None:
    with FakeTensorMode():
        good = arguments(2, 8, 512)
        like = dict(dtype=torch.bfloat16, device="cuda")
        columns = torch.empty_strided((2, 8), (1, 2), dtype=torch.int64, device="cuda")
        broken = [
            (dict(q=torch.empty_strided((16, 32, 128), (8192, 256, 2), **like)), ValueError, "q has gaps inside its"),
            (dict(out=torch.empty_strided((16, 32, 128), (8192, 256, 1), **like)), ValueError, "out has gaps between"),
            (dict(ancestors=columns), ValueError, "ancestors has gaps between its rows"),
            (dict(tail=65), ValueError, "tail is 65, wanted 0 to 64"),
            (
                dict(slot_table=torch.empty(64, 512, dtype=torch.int64, device="cuda")),
                TypeError,
                "slot_table is int64, wanted int32",
            ),
            (dict(q=torch.empty(9, 32, 128, **like)), ValueError, r"q has shape \[9, 32, 128\], wanted \[16, "),
        ]
        for change, error, message in broken:
            with pytest.raises(error, match=message):
                attention.tree_attention(**(good | change))
    assert kernels[0].grids == []


@pytest.mark.parametrize(
    "programs, width, rows, warps, splits",
    [
        (8, 131072, 64, 4, 32),
        (8, 2048, 64, 4, 16),
        (8, 100, 64, 4, 1),
        (0, 8192, 64, 4, 64),
        (1, 131072, 64, 4, 64),
        (264, 131072, 64, 4, 1),
        (133, 8192, 64, 4, 1),
        (64, 2048, 64, 4, 4),
        (16, 8192, 128, 4, 16),
        (16, 8192, 128, 8, 8),
        (16, 1024, 128, 4, 4),
        (128, 8192, 128, 4, 2),
        (128, 8192, 128, 8, 1),
    ],
)
def test_splits_that_fill_the_device(programs: int, width: int, rows: int, warps: int, splits: int) -> None:
    tile = triton_tiles.Tile(rows, keys=64, warps=warps, stages=2)
    found = triton_tiles.splits_for(programs, width, processors=132, tile=tile, part_bytes=2**27)
    assert (found.most, found.even) == (splits, splits)
    assert found.least == (128 if rows == 64 else 256)


@pytest.mark.parametrize(
    "programs, width, part_bytes, most",
    [
        (140, 131072, 2**20, 8),
        (140, 131072, 2**25, 4),
        (140, 12288, 2**20, 2),
        (140, 8000, 2**20, 1),
        (512, 131072, 2**20, 4),
        (2048, 131072, 2**20, 2),
        (2048, 131072, 2**27, 1),
    ],
)
def test_splits_of_a_full_batch(programs: int, width: int, part_bytes: int, most: int) -> None:
    """Of a long request among short ones; what they need is bounded."""
    tile = triton_tiles.Tile(64, keys=64, warps=4, stages=2)
    found = triton_tiles.splits_for(programs, width, processors=132, tile=tile, part_bytes=part_bytes)
    assert found == (most, 1, 128, 4096)
    assert most * part_bytes <= triton_tiles.MOST_BYTES
    assert most * programs <= max(16 * 132, 2 * programs)
