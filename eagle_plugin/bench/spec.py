"""What to serve and how, in words that every engine has: the target, the head, the tree and the sizes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Mode = Literal["plain", "builtin", "plugin"]
EngineName = Literal["sglang", "vllm"]


class TreeShape(NamedTuple):
    """The three caps of a draft tree: its depth, the children of a node, and the nodes verified, root included."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.draft_tokens}"

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """`length` drafts in a row, below the root."""
        return cls(length, 1, length + 1)


@dataclass(frozen=True)
class ServerSpec:
    """What to serve and how; `mode` chooses plain decoding, the engine's own speculation, or the plugin's."""

    target: Path
    mode: Mode
    head: Path | None = None
    shape: TreeShape = TreeShape(2, 4, 8)
    engine: EngineName = "sglang"
    algorithm: str = "EAGLE3"
    device: str = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None  # OpenMP threads; None leaves them to the engine and the caller's environment
    context_length: int = 2048
    max_total_tokens: int = 16384
    max_running_requests: int = 8
    memory_fraction: float = 0.3
    extra_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)  # the interpreter of the environment that has the engine

    def __post_init__(self) -> None:
        if self.mode != "plain" and self.head is None:
            raise ValueError(f"mode {self.mode!r} needs a draft head, found none; give its folder with --head")

    @property
    def label(self) -> str:
        """The name of this server in messages, tables and log files."""
        return f"{self.engine}-{self.mode}-{'fp32' if self.dtype == 'float32' else 'bf16'}"
