"""Checks a draft head in a folder of this disk before any weight is loaded."""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.kinds import find_spec
from eagle_plugin.heads.manifest import fewer_levels


def can_check(target: str, head: str) -> bool:
    """Whether both are folders of this disk, the target's with a config.json.

    Names on a model hub and targets of other formats are loaded, and then checked by their shapes, by the engine.
    """
    return (Path(target) / "config.json").is_file() and Path(head).is_dir()


def head_architecture(head: str) -> str:
    """The class that config.json of a head's folder names, "" where it names none.

    Raises:
        HeadError: the folder has no config.json that can be read.
    """
    names = read_config(head).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def head_warnings(target: str, head: str, algorithm: str, steps: int | None = None) -> list[str]:
    """Check a head's folder, of whatever class, against its target's by the rules of SGLang; returns warnings for the
    log, with what SGLang serves otherwise than it was trained.

    steps: the user's cap of a tree's depth.

    Raises:
        HeadError: the head does not fit the target, or is not a head of Llama layers for this algorithm; `LeftToEngine`
            where the engine's own worker may serve it.
    """
    misread: list[str] = []
    found = check_head(target, head, algorithm=algorithm, misread=misread.append)
    return [*misread, *found.warnings, *fewer_levels(head, find_spec(found.kind), steps)]


def refuse_targets_config(target: str, head: str) -> None:
    """Raise HeadError where the head's folder has the target's config.json, whatever class it names."""
    if (Path(head) / "config.json").is_file() and read_config(head) == read_config(target):
        raise HeadError(
            f"{head} has the config.json of the target {target}, wanted the draft head's own; give the head's folder, "
            "and copy its config.json again"
        )
