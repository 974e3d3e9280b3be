"""The Prometheus metrics of the plugin in this process."""

from __future__ import annotations

from typing import Any, TypeVar

PREFIX = "eagle_plugin:"
_registered: list[Any] = []
T = TypeVar("T")


def register(metric: T) -> T:
    """This metric, which `forget` takes out of the registry again."""
    _registered.append(metric)
    return metric


def forget() -> None:
    """Take the metrics of an earlier engine out of this process's registry."""
    from prometheus_client import REGISTRY

    while _registered:
        REGISTRY.unregister(_registered.pop())
