"""What is checked before any weight is loaded: a draft head in a folder of this disk."""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.heads.checkpoint import HeadError, check_head, check_stored, read_config
from eagle_plugin.heads.kinds import find_spec
from eagle_plugin.heads.manifest import trained_depths


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
    """Check a head's folder, of whatever class, against its target's; returns warnings for the log.

    steps: the user's cap of a tree's depth.

    Raises:
        HeadError: the head does not fit the target, or is not a head of Llama layers for this algorithm.
    """
    found = check_head(target, head, algorithm=algorithm)
    depths = trained_depths(head) if find_spec(found.kind).levels == "parallel" else None
    if steps is None or depths is None or depths >= steps:
        return list(found.warnings)
    return [
        *found.warnings,
        f"{head} was trained to draft {depths} tokens in one forward, so its trees have {depths} levels and not "
        f"{steps}; train it with phases.steps {steps} for deeper ones",
    ]


def foreign_head_warnings(target: str, head: str) -> list[str]:
    """As `head_warnings`, for a config.json in words that the engine understands and `check_head` does not."""
    return check_stored(target, head)


def refuse_targets_config(target: str, head: str) -> None:
    """Raise HeadError where the head's folder has the target's config.json, whatever class it names."""
    if (Path(head) / "config.json").is_file() and read_config(head) == read_config(target):
        raise HeadError(
            f"{head} has the config.json of the target {target}, wanted the draft head's own; give the head's folder, "
            "and copy its config.json again"
        )
