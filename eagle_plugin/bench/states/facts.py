"""What a report says of the head and of the command, without a path of this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.bench.states.document import HeadFacts
from eagle_plugin.common.file_digests import hash_file
from eagle_plugin.heads.manifest import read_manifest


def head_facts(folder: Path) -> HeadFacts:
    """The name, the digests and the training of a head.

    Raises:
        HeadError: its manifest cannot be read.
        OSError: its weights cannot be read.
    """
    manifest = read_manifest(folder) or {}
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(bytes.fromhex(hash_file(path)))
    return HeadFacts(
        name=shown_name(folder),
        config_sha256=hash_file(folder / "config.json"),
        weights_sha256=weights.hexdigest(),
        kind=manifest.get("kind"),
        training=_without_folders(manifest.get("training")),
    )


def shown_name(path: Path) -> str:
    """The last name of a folder; of a job's OUT/head and OUT/train/NAME/head, which all end alike, the last two."""
    path = path.absolute()
    return "/".join(path.parts[-2:]) if path.name == "head" else path.name


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with each path as its `shown_name`: a report has no names of users or folders.

    Nor does it have --resume: who repeats the command begins anew.
    """
    return [_without_folders(text) for text in arguments if text != "--resume"]


def _without_folders(value: Any) -> Any:
    """A JSON value with the `shown_name` of each path in it."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown_name(Path(value)) if isinstance(value, str) and "/" in value else value
