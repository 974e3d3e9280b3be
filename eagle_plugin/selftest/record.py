"""Keeps what a self-test found on disk, once per device, driver, versions, sources and model shape."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import eagle_plugin
from eagle_plugin.common import keyed_json
from eagle_plugin.common.atomic_io import replace_output
from eagle_plugin.common.devices import device_key
from eagle_plugin.common.installed import kernel_libraries
from eagle_plugin.kernels import loader

SOURCES = ("core", "kernels", "policy", "runtime", "selftest", "sglang", "vllm")  # rooms that decide about a result
VERSION = 2  # of the records' form


class Record(NamedTuple):
    """The result of one self-test."""

    reasons: list[str]  # one sentence per thing that differed; empty: it passed
    date: str
    seconds: float
    captured: list[list[int]] = []  # what had graphs in the test: pairs of a batch size and the most nodes of its trees

    @property
    def passed(self) -> bool:
        return not self.reasons

    def tells_of(self, captured: Sequence[list[int]]) -> bool:
        """Whether a server that has captured this may rely on the record: all of it was tested, or something failed."""
        return not self.passed or all(pair in self.captured for pair in captured)


def folder() -> Path:
    """Where the records are."""
    return loader.cache_dir().parent / "selftest"


def key_of(part: str, device: torch.device | str, shape: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """What a result depends on.

    part: what was tested. shape: sizes and settings that the inputs were made for. engine: name and version, "" of a
    test without one.
    """
    device = torch.device(device)
    return {
        "part": part,
        **device_key(device),
        "torch": torch.__version__,
        "libraries": kernel_libraries(),
        "plugin": eagle_plugin.__version__,
        "sources": sources_digest(device.type),
        "engine": engine,
        "shape": dict(shape),
    }


def read(key: Mapping[str, Any]) -> Record | None:
    """The record of this key; None where there is none, or none that can be read and understood."""
    try:
        kept = keyed_json.read(_path(key), key, VERSION)
        reasons, seconds = kept["reasons"], float(kept["seconds"])
        if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
            return None
        return Record(reasons, str(kept["date"]), seconds, [[int(n) for n in pair] for pair in kept["captured"]])
    except (OSError, keyed_json.OtherKeyError, ValueError, KeyError, TypeError, RecursionError):
        return None


def kept() -> list[Record]:
    """All records of the present sources, of any device and shape; those that cannot be read are left out."""
    found, present = [], {sources_digest(kind) for kind in loader.KINDS}
    for path in sorted(folder().glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["key"]["sources"] in present:
                found.append(Record(list(content["reasons"]), str(content["date"]), float(content["seconds"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def write(key: Mapping[str, Any], reasons: list[str], seconds: float, captured: Sequence[list[int]] = ()) -> Record:
    """Keep a result; captured: as `Record.captured`.

    Raises:
        WriteError: it cannot be written.
    """
    record = Record(reasons, datetime.now(timezone.utc).isoformat(timespec="seconds"), seconds, list(captured))
    keyed_json.write(_path(key), key, VERSION, record._asdict())
    return record


def check_writable() -> None:
    """Raise now what `write` would raise after the test.

    Raises:
        WriteError: nothing can be written to the folder of the records.
    """
    probe = folder() / "probe"
    with replace_output(probe, keyed_json.FIX) as temporary:
        temporary.write_text("a record can be written here\n", encoding="utf-8")
    probe.unlink(missing_ok=True)


def forget() -> int:
    """Remove every record, of any device and shape; returns how many.

    Raises:
        OSError: one cannot be removed.
    """
    found = sorted(folder().glob("*.json"))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def sources_digest(kind: str) -> str:
    """A digest of the Python sources that decide about a result, and of the native library or its sources."""
    digest = hashlib.sha256(_python_digest().encode())
    mode, override = os.environ.get("EAGLE_KERNELS", ""), os.environ.get("EAGLE_LIBRARY", "")
    digest.update(f"{mode}\0{override}\0".encode())
    library = loader.kernel_library(kind) if kind in loader.KINDS else None
    shipped = library.shipped() if library else None
    native = [shipped] if shipped else []
    if not native and (csrc := loader.source_folder()):
        native = sorted(path for path in csrc.rglob("*") if path.is_file())
    if library and library.override and override:
        native = [Path(override)]
    for path in native:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _python_digest() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        for path in sorted((loader.PACKAGE / name).rglob("*.py")):
            digest.update(str(path.relative_to(loader.PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _path(key: Mapping[str, Any]) -> Path:
    return keyed_json.path_of(folder(), key, f"{key['part']}-")
