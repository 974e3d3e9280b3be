"""tests/support/on_device.py: calls that run on copies of their tensors end as if they had not."""

from __future__ import annotations

from types import SimpleNamespace

import on_device
import pytest
import torch

from eagle_plugin.core.verify import compact_rows
from eagle_plugin.kernels import kv, tree

CPU = "cpu"  # copies on the CPU, in place of a GPU


def test_arguments_and_results_come_back() -> None:
    seen = []

    def add_(x: torch.Tensor, pair: tuple[torch.Tensor, int], *, out: torch.Tensor | None = None) -> object:
        seen.append((x, pair[0]))
        x.add_(pair[0] * pair[1])
        return (out, x.sum())

    x, y, out = torch.ones(2, 3), torch.full((3,), 2.0), torch.zeros(1)
    found = on_device.moves_tensors(add_, CPU)(x, (y, 5), out=out)
    assert x.tolist() == [[11.0] * 3] * 2 and found[0] is out and float(found[1]) == 66
    assert all(moved.data_ptr() not in (x.data_ptr(), y.data_ptr()) for moved in seen[0])


def test_gaps_stay_and_one_tensor_stays_one() -> None:
    wide = torch.arange(12.0).view(3, 4)[:, :2]

    def look(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(stride=a.stride(), same=a is b, expanded=c.tolist())

    found = on_device.moves_tensors(look, CPU)(wide, wide, torch.ones(1).expand(2))
    assert found.stride == (4, 1) and found.same and found.expanded == [1.0, 1.0]


def test_caches_given_by_address() -> None:
    cache = torch.arange(24.0).view(8, 3)
    wanted = cache.clone()
    window, index = torch.tensor([[4, 5, 6]]), torch.tensor([[0, 2]], dtype=torch.int32)
    lengths = torch.tensor([2], dtype=torch.int32)
    compact_rows(wanted, window, index, lengths)
    moved = on_device.moves_caches(kv.compact_kv, CPU)
    moved(torch.tensor([cache.data_ptr()]), torch.tensor([12]), window, index, lengths, slots=8)
    assert torch.equal(cache, wanted)


def test_every_kernel_function_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree.grow_level
    with monkeypatch.context() as patch:
        on_device.patch(patch, CPU)
        assert tree.grow_level is not before and tree.grow_level.__wrapped__ is before
    functions = {"grow_level", "grow_levels", "select_tree", "sibling_links", "topk_log_softmax"}
    assert functions == on_device.functions_of(tree).keys()
    assert {"compact_kv", "store_kv"} == on_device.functions_of(kv).keys()
