"""What is checked before any weight is loaded: a draft head in a folder of this disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_plugin.heads.checkpoint import check_head, read_config


def head_warnings(target: str, head: str, algorithm: str, architectures: Sequence[str]) -> list[str]:
    """Check a head against its target; returns warnings for the log.

    Only folders are checked, and only heads of these architectures: names on a model hub and other formats are loaded,
    and then checked by their shapes, by the engine.

    Raises:
        HeadError: the head does not fit the target.
    """
    if not (Path(target).is_dir() and Path(head).is_dir()):
        return []
    if (read_config(head).get("architectures") or ["?"])[0] not in architectures:
        return []
    return list(check_head(target, head, algorithm=algorithm).warnings)
