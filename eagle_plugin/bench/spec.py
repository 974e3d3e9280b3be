"""What to serve and how, in terms that every engine has: the target, the head, the tree and the sizes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.kinds import served_algorithm, vllm_options
from eagle_plugin.policy.shapes import CPU_SHAPE

Mode = Literal["plain", "builtin", "plugin"]
EngineName = Literal["sglang", "vllm"]
TOKENS_PER_REQUEST = 640  # a prompt of usual length and its answer; while the cache is full, requests wait

CONTEXT = 2048  # tokens of a request, prompt and answer, unless the user says otherwise
CACHE_TOKENS = 16384
SPARE_TOKENS = 512  # vLLM starts only with more than one request of the context: one of its blocks holds none


@dataclass(frozen=True)
class ServerSpec:
    """What to serve and how; `mode` chooses plain decoding, the engine's own speculation, or the plugin's."""

    target: Path
    mode: Mode
    head: Path | None = None
    shape: Shape = CPU_SHAPE
    engine: EngineName = "sglang"
    # SGLang's name of the speculation; None: that of the head, see `speculation`. With a name and no head the target
    # drafts by layers of its own.
    algorithm: str | None = None
    device: str = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None  # OpenMP threads; None: the engine and the caller's environment decide
    context_length: int = CONTEXT
    max_total_tokens: int = CACHE_TOKENS  # of the cache; 0: as many as there is memory for
    max_running_requests: int = 8
    gpu_servers: int = 0  # that share its GPU, this one included; 0: none does, and the engine decides about memory
    is_async: bool = False  # of vLLM's plugin: asynchronous scheduling on a CPU too
    extra_flags: tuple[str, ...] = ()  # of the engine; they come last, and override those above
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)  # the interpreter of the environment in which the engine is installed
    directory: Path | None = None  # the working directory; `python -m` puts it first on the module path
    name: str = ""  # what tells two servers with the same engine, mode and dtype apart

    def __post_init__(self) -> None:
        if self.mode != "plain" and self.head is None and self.algorithm is None:
            raise ValueError(f"mode {self.mode!r} needs a draft head, found none; give its folder with --head")
        fault = self.shape.fault()
        if self.engine == "vllm" and self.shape.steps >= self.shape.width:
            fault = fault or f"vLLM drafts {self.shape.width - 1} tokens per round, and steps may not be more"
        if self.mode == "plugin" and fault:
            raise ValueError(f"the plugin serves no tree {self.shape} (steps/topk/nodes): {fault}; give another one")

    def for_concurrency(self, requests: int) -> ServerSpec:
        """The same server for so many requests at a time, with room in the cache for `TOKENS_PER_REQUEST` of each."""
        tokens = max(self.max_total_tokens, requests * TOKENS_PER_REQUEST)
        return replace(self, max_running_requests=requests, max_total_tokens=tokens)

    def alone(self) -> ServerSpec:
        """The same server where no other shares its GPU: the engine decides about memory. On a CPU nothing changes."""
        return self if self.device == "cpu" else replace(self, gpu_servers=0, max_total_tokens=0)

    def beside(self, others: int) -> ServerSpec:
        """The same server where so many others share its GPU. On a CPU nothing changes."""
        return self if self.device == "cpu" else replace(self, gpu_servers=others + 1)

    @property
    def speculation(self) -> str:
        """SGLang's name of the speculation; EAGLE3 where the head's config.json does not say it."""
        return self.algorithm or served_algorithm(self._head_config)

    @property
    def vllm_options(self) -> dict[str, Any]:
        """What vLLM's --speculative-config says of the head's kind."""
        return vllm_options(self._head_config)

    @property
    def _head_config(self) -> dict[str, Any]:
        with contextlib.suppress(HeadError):  # the engine says what is wrong with the folder
            return {} if self.head is None else read_config(self.head)
        return {}

    @property
    def drafts(self) -> str:
        """What it drafts, in reports: the shape, and whether its steps are scheduled ahead."""
        return f"{self.shape}{' async' if self.is_async and self.mode == 'plugin' else ''}"

    @property
    def label(self) -> str:
        """The name of this server in messages, tables and log files."""
        label = f"{self.engine}-{self.mode}-{'fp32' if self.dtype == 'float32' else 'bf16'}"
        return f"{label}-{self.name}" if self.name else label
