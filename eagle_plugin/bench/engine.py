"""What the bench must know of an engine: how to launch it, and where its HTTP server keeps what we ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from eagle_plugin.bench.spec import EngineName, Mode, ServerSpec
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.manifest import parallel_levels
from eagle_plugin.policy.shapes import GPU_SHAPE, shape_for

# What SGLang's own worker takes on a GPU without flags: a chain for nearly all targets, a tree for Llama.
GPU_CHAIN = Shape.chain(3)
GPU_TREE = Shape(5, 4, 8)


@dataclass(frozen=True)
class Engine:
    """Everything that differs between one engine and another."""

    name: EngineName
    distributions: tuple[str, ...]  # the Python distributions whose versions a report gives
    plugin_list: str  # the environment variable with which users choose the engine's plugins
    cpu_modules: Mapping[str, str]  # what the engine imports on a CPU beside its own: module -> how to install it
    reserved_cores: int  # cores left to the engine's processes that do not compute, if there is more than one core
    drafts: int  # tokens that the plugin drafts per round on a CPU, if the user gives no tree
    builtin_shape: Shape  # the tree or chain of the engine's own speculation on a CPU, if the user gives none
    sweep_shapes: Mapping[Mode, tuple[Shape, ...]]
    command: Callable[[ServerSpec, int], list[str]]  # spec, port -> args; ValueError for what it cannot serve
    # spec, the caller's -> additions; ValueError for what it cannot serve
    environment: Callable[[ServerSpec, Mapping[str, str]], dict[str, str]]
    version_path: str  # a GET of it returns JSON with a "version"
    flush: Callable[[httpx.Client], bool]  # empties the prefix cache; False: requests still hold parts of it
    request_fields: Mapping[str, Any]  # added to every request, so that the answer reports its verify rounds
    # Rounds of a request, plain ones included, read from one chunk of a stream; None if the chunk has no such field.
    verify_rounds: Callable[[Any], int | None]
    # Rounds of a request that accepted exactly 0, 1, 2, ... drafts, read in the same way.
    accepted_drafts: Callable[[Any], tuple[int, ...] | None]

    def plugin_shape(self, head: Path | None, device: str = "cpu", target: Path | None = None) -> Shape:
        """The plugin's tree for the head in this folder, if the user gives none: as the plugin itself chooses it."""
        levels = parallel_levels(head)
        if device == "cpu":
            return shape_for(self.drafts, levels=levels)
        own = self.own_shape(device, target)
        if own.topk > 1 and levels is None:
            return own  # the engine's tree stays
        return shape_for(GPU_SHAPE.width - 1, levels=levels, on_gpu=True)

    def own_shape(self, device: str, target: Path | None = None) -> Shape:
        """The tree or chain of the engine's own speculation for the target in this folder, if the user gives none."""
        if device == "cpu":
            return self.builtin_shape
        return GPU_TREE if self.builtin_shape.topk > 1 and _is_llama(target) else GPU_CHAIN

    def own_tree(self, device: str) -> Shape | None:
        """The same where the engine's own speculation has trees; None where it drafts chains only."""
        if self.builtin_shape.topk == 1:
            return None
        return self.builtin_shape if device == "cpu" else GPU_TREE

    def default_threads(self, cores: int) -> int:
        """OpenMP threads of a server that has `cores` for itself."""
        return max(1, cores - self.reserved_cores)


def _is_llama(target: Path | None) -> bool:
    try:
        return target is not None and read_config(target).get("architectures") == ["LlamaForCausalLM"]
    except HeadError:  # a name on a model hub
        return False


class EngineEndpoint(NamedTuple):
    """The address of a running server, the engine that it runs, and HTTP headers of the questions to it."""

    url: str
    engine: Engine
    headers: tuple[tuple[str, str], ...] = ()
