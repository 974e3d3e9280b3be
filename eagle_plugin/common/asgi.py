"""The words of ASGI that our middleware of the engines' servers speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def route_of(scope: Any) -> str:
    """The path of a request below that of the application."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
