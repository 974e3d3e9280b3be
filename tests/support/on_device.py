"""Runs the kernel tests on another device: the typed functions of `eagle_plugin.kernels` with their tensors moved.

The tests make CPU tensors and compare with the oracles on the CPU. With EAGLE_TEST_DEVICE=cuda every call copies its
tensors to the GPU, runs there, and copies results and changed arguments back. With EAGLE_TEST_DEVICE=cpu the same
happens with copies on the CPU, which tests this file.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eagle_plugin.kernels import (
    accepted_path,
    attention,
    gated_delta_trees,
    kv,
    lookup,
    penalties,
    round_start,
    sampling,
    tree,
)

MODULES = (tree, sampling, kv, attention, gated_delta_trees, penalties, accepted_path, round_start, lookup)


def patch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let the functions of the kernel modules run on this device."""
    for module in MODULES:
        for name, function in functions_of(module).items():
            moved = moves_caches(function, device) if name == "compact_kv" else moves_tensors(function, device)
            monkeypatch.setattr(module, name, moved)


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that a module defines itself."""
    named = {name: getattr(module, name) for name in module.__all__}
    return {name: x for name, x in named.items() if inspect.isfunction(x) and x.__module__ == module.__name__}


def copy_to(device: str, tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that rows with gaps have gaps there too."""
    if 0 in tensor.stride():
        return tensor.to(device, copy=True)
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor)


def moves_tensors(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function, run on copies of its tensors."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        pairs: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor that is given twice is one there too

        def there(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return pairs.setdefault(id(value), (value, copy_to(device, value)))[1]

        args, kwargs = tree_map(there, (args, kwargs))
        out = function(*args, **kwargs)
        for here, moved in pairs.values():
            if 0 not in here.stride():
                here.copy_(moved)
        return tree_map(lambda x: result_of(x, pairs.values()) if isinstance(x, Tensor) else x, out)

    return run


def result_of(found: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """What a test gets for a result: of its own tensor where the result is a part of the copy, else a copy."""
    for here, there in pairs:
        if found is there:
            return here
        if found.numel() and found.untyped_storage().data_ptr() == there.untyped_storage().data_ptr():
            return here.as_strided(found.shape, found.stride(), here.storage_offset() + found.storage_offset())
    return found.cpu()


def moves_caches(compact: Callable[..., None], device: str) -> Callable[..., None]:
    """`compact_kv`, which is given the addresses of the caches, run on copies of them."""
    inner = moves_tensors(compact, device)

    @functools.wraps(compact)
    def run(data_ptrs: Tensor, row_bytes: Tensor, *rest: Any, slots: int) -> None:
        caches = []
        for address, size in zip(data_ptrs.tolist(), row_bytes.tolist(), strict=True):
            memory = (ctypes.c_char * (slots * size)).from_address(address % 2**64)
            caches.append(torch.frombuffer(memory, dtype=torch.uint8))
        copies = [cache.to(device, copy=True) for cache in caches]
        inner(torch.tensor([x.data_ptr() for x in copies]), row_bytes, *rest, slots=slots)
        for cache, copied in zip(caches, copies, strict=True):
            cache.copy_(copied)

    return run
