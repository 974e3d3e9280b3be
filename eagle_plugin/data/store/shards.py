"""The shards of a feature store: safetensors files that list their own documents.

The tensors of document k are adjacent, so that one ranged read gets all of them:

    k.ids U32 [n]    k.aux BF16 [n, A * H]    k.last BF16 [n, H]    k.mask U8 [n, and zeros up to a multiple of 8 bytes]

The entries of all documents are in the metadata of the header, so that a shard needs no index file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from eagle_plugin.data.rows import DataError
from eagle_plugin.data.store.manifest import Manifest
from eagle_plugin.data.store.objects import Folder, ObjectExists

HEADER_GUESS = 64 << 10  # bytes of the first request, which include most headers completely


@dataclass(frozen=True)
class Document:
    """One token row with the target's hidden states, on the CPU.

    aux is None if the store has no aux layers.
    """

    id: str
    source: str
    split: str
    ids: Tensor  # [n] int64
    mask: Tensor  # [n] bool: response tokens
    aux: Tensor | None  # [n, A * H] bfloat16: inputs of the aux layers, in ascending order of the layers
    last: Tensor  # [n, H] bfloat16: what lm_head reads


@dataclass(frozen=True)
class Entry:
    """Where a document is in the store, and what is known about it without reading it."""

    id: str
    source: str
    split: str
    shard: str
    offset: int  # bytes from the start of the shard
    length: int  # tokens
    n_response: int  # response tokens
    sha256: str  # of the document's bytes


@dataclass(frozen=True)
class Layout:
    """The tensors of a document of n tokens in a shard."""

    n: int
    aux_width: int
    hidden: int

    @classmethod
    def of(cls, manifest: Manifest, n: int) -> Layout:
        """The layout in a store with this manifest."""
        return cls(n, len(manifest.aux_layers) * manifest.hidden_size, manifest.hidden_size)

    @property
    def parts(self) -> list[tuple[str, str, list[int], int]]:
        """(name, safetensors dtype, shape, bytes) in the order of the file."""
        n, states = self.n, 2 * self.n * (self.aux_width + self.hidden)
        parts = [("ids", "U32", [n], 4 * n)]
        if self.aux_width:
            parts.append(("aux", "BF16", [n, self.aux_width], 2 * n * self.aux_width))
        parts.append(("last", "BF16", [n, self.hidden], 2 * n * self.hidden))
        padded = n + -(4 * n + states + n) % 8  # keeps every document, and so every tensor, aligned to 8 bytes
        parts.append(("mask", "U8", [padded], padded))
        return parts

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(size for *_, size in self.parts)


def encode(document: Document, manifest: Manifest) -> bytes:
    """The bytes of a document in a shard; states are stored as bfloat16.

    Raises:
        DataError: a tensor does not have the shape that the manifest asks for.
    """
    n, layout = len(document.ids), Layout.of(manifest, len(document.ids))
    for name, tensor, wanted in (
        ("aux", document.aux, (n, layout.aux_width) if layout.aux_width else None),
        ("last", document.last, (n, layout.hidden)),
        ("mask", document.mask, (n,)),
    ):
        found = None if tensor is None else tuple(tensor.shape)
        if found != wanted:
            raise DataError(f"document {document.id!r} has {name} {found}, wanted {wanted}; extract it again")
    parts = {
        "ids": document.ids.to(torch.int32),
        "aux": None if document.aux is None else document.aux.to(torch.bfloat16),
        "last": document.last.to(torch.bfloat16),
        "mask": torch.nn.functional.pad(document.mask.to(torch.uint8), (0, layout.parts[-1][3] - n)),
    }
    return b"".join(
        tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in parts.values() if tensor is not None
    )


def decode(entry: Entry, data: bytes | bytearray, manifest: Manifest) -> Document:
    """The document of an entry from its bytes; its hidden states share the memory of a bytearray."""
    layout = Layout.of(manifest, entry.length)
    raw = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    parts = dict(zip((name for name, *_ in layout.parts), raw.split([size for *_, size in layout.parts]), strict=True))
    n = entry.length
    aux = parts.get("aux")
    return Document(
        id=entry.id,
        source=entry.source,
        split=entry.split,
        ids=parts["ids"].view(torch.int32).long(),
        mask=parts["mask"][:n].bool(),
        aux=None if aux is None else aux.view(torch.bfloat16).view(n, -1),
        last=parts["last"].view(torch.bfloat16).view(n, -1),
    )


def write_shard(folder: Folder, name: str, documents: list[tuple[Entry, bytes]], manifest: Manifest) -> None:
    """Write one shard whole; shard, offset and sha256 of the entries are filled in.

    Raises:
        DataError: the shard exists already, or it cannot be written.
    """
    header: dict[str, object] = {}
    entries, start = [], 0
    for k, (entry, data) in enumerate(documents):
        # in the header, offsets count from the first tensor
        entries.append(asdict(replace(entry, shard=name, offset=start, sha256=hashlib.sha256(data).hexdigest())))
        for part, dtype, shape, size in Layout.of(manifest, entry.length).parts:
            header[f"{k}.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
            start += size
    header["__metadata__"] = {"documents": json.dumps(entries, separators=(",", ":"))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        folder.create(name, b"".join([struct.pack("<Q", len(text)), text, *(data for _, data in documents)]))
    except ObjectExists as error:
        raise DataError(
            f"{folder.url}/{name} was written by another process at the same time; give every process its own --rank"
        ) from error


def read_entries(folder: Folder) -> list[Entry]:
    """The entries of all shards, by rank and in the order of writing; of two entries with one id, the first.

    Raises:
        DataError: a file has the name of a shard and is not one.
    """
    names = [name for name in folder.names() if name.startswith("shard-") and name.endswith(".safetensors")]
    entries: dict[str, Entry] = {}
    with ThreadPoolExecutor(16) as pool:  # a remote store needs one round trip per header
        for found in pool.map(lambda name: _read_header(folder, name), names):
            for entry in found:
                entries.setdefault(entry.id, entry)
    return list(entries.values())


def _read_header(folder: Folder, name: str) -> list[Entry]:
    try:
        data = folder.read(name, 0, HEADER_GUESS)
        stop = 8 + struct.unpack("<Q", data[:8])[0]
        if stop > len(data):
            data = folder.read(name, 0, stop)
        found = json.loads(json.loads(data[8:stop])["__metadata__"]["documents"])
        return [Entry(**{**values, "shard": name, "offset": stop + values["offset"]}) for values in found]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise DataError(
            f"{folder.url}/{name} is not a shard of a feature store ({error}); "
            "copy it again, or delete it and extract again"
        ) from error
