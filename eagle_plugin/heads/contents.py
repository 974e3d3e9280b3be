"""What the files of a head hold, byte by byte: values that are not finite, and the record that an export leaves.

The record is two keys of eagle_plugin.json: the values of config.json, and a sha256 digest of every tensor. It finds
what no comparison of names and shapes can: a flipped bit, two matrices of one shape in each other's place, another
`rope_theta`. torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_plugin.heads.files import HeadError, StoredTensor

DIGESTS, CONFIG = "tensors_sha256", "config"  # keys of eagle_plugin.json
# Keys of config.json that a user, an engine or a library may change and that leave the head's numbers as they are.
FREE_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "max_position_embeddings",  # check_head itself asks for a greater one
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Infinity as the bits of an unsigned number without the sign, by safetensors' names of the types. NaN is above it.
_INFINITY = {"BF16": (np.uint16, 0xFF00), "F16": (np.uint16, 0xF800), "F32": (np.uint32, 0xFF000000)}
CHUNK = 1 << 20  # bytes: stays in a core's cache between the two passes over it


def record(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of eagle_plugin.json with which `compare_record` finds every change of a head that is exported now.

    Raises:
        HeadError: a tensor has a value that is not finite.
    """
    return {CONFIG: _meaning(config), DIGESTS: scan(tensors.values(), digests=True)}


def scan(tensors: Iterable[StoredTensor], *, digests: bool) -> dict[str, str]:
    """Read tensors in one pass, a chunk at a time; returns the digest of each by its name, or nothing.

    A core with SHA instructions needs about one second per GB with digests and 0.3 without, once the file is in memory.

    Raises:
        HeadError: a floating-point tensor has a value that is not finite.
    """
    found = {}
    files: dict[Path, tuple[np.memmap[Any, Any], dict[str, Any], int]] = {}
    for tensor in tensors:
        if tensor.file not in files:
            files[tensor.file] = _open(tensor.file)
        stored, header, first = files[tensor.file]
        begin, end = header[tensor.name]["data_offsets"]
        found[tensor.name] = _scan_tensor(tensor, stored[first + begin : first + end], digests)
    return found if digests else {}


def _open(path: Path) -> tuple[np.memmap[Any, Any], dict[str, Any], int]:
    """The bytes of a safetensors file, its header, and where its data begin; `read_tensors` has checked the file."""
    stored = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(stored[:8].tobytes(), "little")
    return stored, json.loads(stored[8 : 8 + length].tobytes()), 8 + length


def _scan_tensor(tensor: StoredTensor, data: np.ndarray, digest: bool) -> str:
    """The digest is over the type and the shape too, so that equal bytes of another meaning have another one."""
    unsigned, infinity = _INFINITY.get(tensor.dtype, (np.uint8, None))
    total = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    for begin in range(0, len(data), CHUNK):
        chunk = data[begin : begin + CHUNK]
        # The shift drops the sign.
        if infinity is not None and int((chunk.view(unsigned) << 1).max()) >= infinity:
            raise HeadError(
                f"{tensor.file.parent} has {tensor.name} with {_count(data.view(unsigned), infinity):,} values that "
                "are not finite (Inf or NaN), with which no draft is accepted; export an earlier checkpoint of the "
                "training, or copy the file again"
            )
        if digest:
            total.update(chunk.data)
    return total.hexdigest()


def _count(values: np.ndarray, infinity: int) -> int:
    return int(((values << 1) >= infinity).sum())


def compare_record(
    manifest: Mapping[str, Any], digests: Mapping[str, str], config: Mapping[str, Any], folder: Path
) -> None:
    """Compare a head with the record of its export; a manifest without one is not compared.

    digests: of all tensors, as `scan` makes them; config: config.json as it is stored.

    Raises:
        HeadError: a tensor or a key of config.json is not what the export wrote.
    """
    changed = []
    if isinstance(wanted := manifest.get(DIGESTS), dict):
        changed += [name for name in sorted(wanted.keys() | digests.keys()) if wanted.get(name) != digests.get(name)]
    if isinstance(wanted := manifest.get(CONFIG), dict):
        now = _meaning(config)
        changed += [
            f"{key} (now {now.get(key)!r}, exported as {wanted.get(key)!r})"
            for key in sorted(wanted.keys() | now.keys())
            if wanted.get(key) != now.get(key)
        ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise HeadError(
            f"{folder} is not as it was exported: {', '.join(changed[:3])}{more} differ from the record in "
            "eagle_plugin.json; copy the head again, or, if the change is wanted, write a new record: "
            f"eagle-plugin export {folder} NEW --target TARGET"
        )


def has_digests(manifest: Mapping[str, Any] | None) -> bool:
    """Whether a manifest has digests to compare with."""
    return manifest is not None and isinstance(manifest.get(DIGESTS), dict)


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json on which the head's numbers depend."""
    return {key: value for key, value in config.items() if key not in FREE_KEYS}


def is_zero(tensor: StoredTensor) -> bool:
    """Whether all values of a stored tensor are zero; ends at the first that is not."""
    stored, header, first = _open(tensor.file)
    begin, end = header[tensor.name]["data_offsets"]
    data = stored[first + begin : first + end]
    return not any(data[at : at + CHUNK].any() for at in range(0, len(data), CHUNK))


def read_rows(tensor: StoredTensor, rows: np.ndarray) -> np.ndarray | None:
    """Some rows of a stored matrix, [len(rows), columns] float64; None of a type that is none of a head's weights."""
    unsigned = _INFINITY.get(tensor.dtype)
    if unsigned is None:
        return None
    stored, header, first = _open(tensor.file)
    begin, end = header[tensor.name]["data_offsets"]
    bits = stored[first + begin : first + end].reshape(tensor.shape[0], -1)[rows].view(unsigned[0])
    if tensor.dtype == "BF16":
        bits = bits.astype(np.uint32) << 16
    return bits.view(np.float16 if tensor.dtype == "F16" else np.float32).astype(np.float64)
