"""JSON files in the plugin's cache folder, each under the digest of a key that says what its content depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import replace_output

FIX = "set EAGLE_CACHE_DIR to a folder that can be written"


class OtherKeyError(Exception):
    """A file that was written for another key, or by another version of the plugin."""


def path_of(folder: Path, key: Mapping[str, Any], prefix: str = "") -> Path:
    """Where the content of a key is; key: JSON values."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return folder / f"{prefix}{digest}.json"


def read(path: Path, key: Mapping[str, Any], version: int) -> dict[str, Any]:
    """What `write` put there.

    Raises:
        OSError: there is no such file (FileNotFoundError), or it cannot be read.
        OtherKeyError: its key or its version is another one.
        ValueError, TypeError, KeyError, RecursionError: it is not such a file.
    """
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["version"] != version or kept["key"] != json.loads(json.dumps(key)):
        raise OtherKeyError(f"{path} was written for another key")
    return dict(kept)


def write(path: Path, key: Mapping[str, Any], version: int, content: Mapping[str, Any]) -> None:
    """Keep content, JSON values by name, under a key; version: of the content's form.

    Raises:
        WriteError: it cannot be written; what was kept before is as it was.
    """
    kept = {"version": version, "key": dict(key), **content}
    with replace_output(path, FIX) as temporary:
        temporary.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
