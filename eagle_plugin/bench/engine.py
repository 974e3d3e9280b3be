"""What the bench must know of an engine: how to launch it, and where its HTTP server keeps what we ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from eagle_plugin.bench.spec import EngineName, Mode, ServerSpec, TreeShape


@dataclass(frozen=True)
class Engine:
    """One engine, as a table of what is particular to it."""

    name: EngineName
    distributions: tuple[str, ...]  # whose versions belong into a report
    plugin_list: str  # the variable by which users choose the engine's plugins
    reserved_cores: int  # for its processes that do not compute, where there is more than one core
    plugin_shape: TreeShape  # where the user names none: the plugin's tree and ...
    builtin_shape: TreeShape  # ... the engine's own
    sweep_shapes: Mapping[Mode, tuple[TreeShape, ...]]
    command: Callable[[ServerSpec, int], list[str]]  # spec, port -> words; ValueError for what it cannot serve
    environment: Callable[[ServerSpec, Mapping[str, str]], dict[str, str]]  # spec, the caller's -> additions
    version_path: str  # GET, JSON with a "version"
    flush: Callable[[httpx.Client], bool]  # empty the prefix cache; False: not now, requests still hold parts of it
    request_fields: Mapping[str, Any]  # asked of every request, so that it tells its verify rounds
    verify_rounds: Callable[[Any], int | None]  # read from a chunk of a stream, None where it does not tell them

    def default_threads(self, cores: int) -> int:
        """OpenMP threads of a server that has `cores` to itself."""
        return max(1, cores - self.reserved_cores)


class Endpoint(NamedTuple):
    """A server that is asked over HTTP."""

    url: str
    engine: Engine
