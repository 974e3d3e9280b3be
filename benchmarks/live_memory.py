"""The most bytes of tensors that a piece of code has alive at once: exact and the same in every run, unlike RSS."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """A context in which every tensor that an operation returns is counted until its storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in before and storage not in self._seen:
                    self._count(storage)
        return out

    def _count(self, storage: Any) -> None:
        size = storage.nbytes()
        self._seen[storage] = size
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._alive -= size
