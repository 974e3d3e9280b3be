"""Which operations allocate a tensor of some size or more."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargeTensors(TorchDispatchMode):
    """Inside, the names of the operations whose results lie in memory of their own of so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= self._size and _storage(x) not in given:
                self.made.append(func.name())
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
