"""Lets kernels have resources of their own for our captures in vLLM's workspace, which is locked by then."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized


@contextmanager
def new_resources() -> Iterator[None]:
    """Around captures: kernels may ask vLLM's workspace for resources under keys that it does not have yet.

    vLLM locks its workspace after captures of its own, and a key may have the stream, as that of Marlin's locks: every
    capture is made on another one. The scratch memory stays locked: vLLM's graphs write to it, and a larger one takes
    its place.
    """
    if not is_workspace_manager_initialized() or not current_workspace_manager().is_locked():
        yield
        return
    manager = current_workspace_manager()
    of_locked = manager.get_persistent_resource

    def get(key: Hashable, factory: Callable[[], Any]) -> Any:
        manager.unlock()
        try:
            return of_locked(key, factory)
        finally:
            manager.lock()

    manager.get_persistent_resource = get
    try:
        yield
    finally:
        del manager.get_persistent_resource
