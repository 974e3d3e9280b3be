"""The shards of a feature store: safetensors files that list their own documents.

The tensors of document k are adjacent, so that one ranged read gets all of them:

    k.ids U32 [n]    k.aux BF16 [n, A * H]    k.last BF16 [n, H]    k.mask U8 [n, and zeros up to a multiple of 8 bytes]

or, in a store of float8 states (`states.py`), whose scales are those of the aux layers and of last:

    k.ids    k.scales F32 [n, A + 1]    k.aux F8_E4M3 [n, A * H]    k.last F8_E4M3 [n, H]    k.mask

The entries of all documents are in the metadata of the header, so that a shard needs no index file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from eagle_plugin.collect.settings import StatesForm
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import Folder, ObjectExists
from eagle_plugin.learning.data.store.states import expand, to_float8

HEADER_GUESS = 64 << 10  # bytes of the first request, which include most headers completely
READ_BYTES = 16 << 20  # of one request when a shard is read in full


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
    aux: Tensor | None  # [n, A * H] bfloat16 when read: inputs of the aux layers, in ascending order of the layers
    last: Tensor  # [n, H] bfloat16 when read: what lm_head reads
    scales: Tensor | None = None  # [n, A + 1] float32 of aux and last that are read in float8, as they are stored

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.ids, self.mask, self.aux, self.last, self.scales)
        return sum(part.nbytes for part in parts if part is not None)

    def cut(self, n: int) -> Document:
        """Its first n tokens."""
        aux, scales = (None if part is None else part[:n] for part in (self.aux, self.scales))
        return replace(self, ids=self.ids[:n], mask=self.mask[:n], aux=aux, last=self.last[:n], scales=scales)


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
    form: StatesForm

    @classmethod
    def of(cls, manifest: Manifest, n: int) -> Layout:
        """The layout in a store with this manifest."""
        return cls(n, len(manifest.aux_layers) * manifest.hidden_size, manifest.hidden_size, manifest.states)

    @property
    def parts(self) -> list[tuple[str, str, list[int], int]]:
        """(name, safetensors dtype, shape, bytes) in the order of the file."""
        n, layers = self.n, self.aux_width // self.hidden + 1
        dtype, width = ("BF16", 2) if self.form == "bfloat16" else ("F8_E4M3", 1)
        parts = [("ids", "U32", [n], 4 * n)]
        if self.form == "float8":
            parts.append(("scales", "F32", [n, layers], 4 * n * layers))
        if self.aux_width:
            parts.append(("aux", dtype, [n, self.aux_width], width * n * self.aux_width))
        parts.append(("last", dtype, [n, self.hidden], width * n * self.hidden))
        # Keeps every document aligned to 8 bytes, and its tensors to their elements.
        padded = n + -(sum(size for *_, size in parts) + n) % 8
        parts.append(("mask", "U8", [padded], padded))
        return parts

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(size for *_, size in self.parts)


def encode(document: Document, manifest: Manifest) -> bytearray:
    """The bytes of a document in a shard; raises as `encode_into`."""
    data = bytearray(Layout.of(manifest, len(document.ids)).size)
    encode_into(document, manifest, memoryview(data))
    return data


def encode_into(document: Document, manifest: Manifest, place: memoryview) -> None:
    """Write the bytes of a document to their place, of `Layout.size` bytes.

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
    parts = {"ids": document.ids.to(torch.int32)}
    states = {"last": document.last} if document.aux is None else {"aux": document.aux, "last": document.last}
    if layout.form == "float8":
        rounded = {name: to_float8(tensor, layout.hidden) for name, tensor in states.items()}
        parts["scales"] = torch.cat([scales for _, scales in rounded.values()], dim=1)
        parts |= {name: values for name, (values, _) in rounded.items()}
    else:
        parts |= states
    parts["mask"] = torch.nn.functional.pad(document.mask.to(torch.uint8), (0, layout.parts[-1][3] - n))
    start = 0
    for tensor, (_, dtype, _, size) in zip(parts.values(), layout.parts, strict=True):
        if size:
            there = torch.frombuffer(place, dtype=_DTYPES[dtype], count=tensor.numel(), offset=start)
            there.view(tensor.shape).copy_(tensor)
        start += size


_DTYPES = {
    "U32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


def decode(entry: Entry, data: bytes | bytearray, manifest: Manifest, as_stored: bool = False) -> Document:
    """The document of an entry from its bytes; hidden states in their stored form share the memory of a bytearray.

    as_stored: states in float8 stay so, and the document has their scales; `expand` makes bfloat16 of them.
    """
    layout = Layout.of(manifest, entry.length)
    raw = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    parts = dict(zip((name for name, *_ in layout.parts), raw.split([size for *_, size in layout.parts]), strict=True))
    n = entry.length
    stored = {"float8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}[layout.form]
    aux, last = (parts[name].view(stored).view(n, -1) if name in parts else None for name in ("aux", "last"))
    scales = parts["scales"].view(torch.float32).view(n, -1) if "scales" in parts else None
    assert last is not None
    if scales is not None and not as_stored:
        aux, last, scales = *expand(aux, last, scales), None
    ids, mask = parts["ids"].view(torch.int32).long(), parts["mask"][:n].bool()
    return Document(entry.id, entry.source, entry.split, ids, mask, aux, last, scales)


@dataclass(frozen=True)
class Shard:
    """What the header of a shard says."""

    name: str
    entries: list[Entry]
    size: int  # bytes of the whole object
    plan: int | None  # number of the plan that it was written by; None: written before there were plans


class ShardDamage(DataError):
    """A shard whose bytes are not those that were written; the message says what is wrong, without the shard's name."""


def write_shard(
    folder: Folder,
    name: str,
    documents: Sequence[tuple[Entry, bytes | bytearray | memoryview]],
    manifest: Manifest,
    plan: int,
    replaces: bool = False,
) -> None:
    """Write one shard whole; shard, offset and sha256, where it is empty, of the entries are filled in.

    replaces: a damaged shard of this name is removed first.

    Raises:
        ObjectExists: the shard exists already.
        DataError: it cannot be written.
    """
    digested = [
        entry if entry.sha256 else replace(entry, sha256=hashlib.sha256(data).hexdigest()) for entry, data in documents
    ]
    entries = _place(digested, name, manifest)
    if replaces:
        folder.remove(name)
    try:
        folder.create(name, _header(entries, manifest, plan), *(data for _, data in documents))
    except ObjectExists as error:
        raise ObjectExists(
            f"{folder.url}/{name} was written by another process at the same time; give every process its own --rank"
        ) from error


def shard_bytes(entries: Iterable[Entry], name: str, manifest: Manifest, plan: int) -> int:
    """The size of the shard of this name with documents of these entries; their digests are not needed."""
    placed = _place((replace(entry, sha256="0" * 64) for entry in entries), name, manifest)
    return len(_header(placed, manifest, plan)) + sum(Layout.of(manifest, entry.length).size for entry in placed)


def _place(entries: Iterable[Entry], name: str, manifest: Manifest) -> list[Entry]:
    """The entries of a shard with its name and their offsets, which count from the first tensor in the header."""
    placed, start = [], 0
    for entry in entries:
        placed.append(replace(entry, shard=name, offset=start))
        start += Layout.of(manifest, entry.length).size
    return placed


def _header(entries: Sequence[Entry], manifest: Manifest, plan: int | None) -> bytes:
    """The bytes before the first tensor; `read_in_full` makes them again to compare, so older forms must not change."""
    header: dict[str, object] = {}
    start = 0
    for k, entry in enumerate(entries):
        for part, dtype, shape, size in Layout.of(manifest, entry.length).parts:
            header[f"{k}.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
            start += size
    text = json.dumps([asdict(entry) for entry in entries], separators=(",", ":"))
    marks = {} if plan is None else {"plan": str(plan), "sha256": _digest(text, plan)}
    header["__metadata__"] = {"documents": text, **marks}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def _digest(documents: str, plan: int) -> str:
    return hashlib.sha256(f"{plan}\n{documents}".encode()).hexdigest()


def read_shard(folder: Folder, name: str, size: int | None, manifest: Manifest) -> Shard:
    """Read and check the header of a shard; `size` is that of the object, if it is known.

    Raises:
        ShardDamage: the header is not as it was written, or the object is too short or too long.
    """
    try:
        data = folder.read(name, 0, HEADER_GUESS)
        stop = 8 + struct.unpack("<Q", data[:8])[0]
        if stop > len(data):
            data = folder.read(name, 0, stop)
        marks = json.loads(data[8:stop])["__metadata__"]
        plan = int(marks["plan"]) if "sha256" in marks else None
        if plan is not None and marks["sha256"] != _digest(marks["documents"], plan):
            raise ShardDamage("is damaged: its list of documents does not have its sha256")
        found = json.loads(marks["documents"])
        entries = [Entry(**{**values, "shard": name, "offset": stop + values["offset"]}) for values in found]
        wanted = stop + sum(Layout.of(manifest, entry.length).size for entry in entries)
    except FileNotFoundError as error:
        raise ShardDamage("is missing") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise ShardDamage(f"is damaged: its header is not that of a shard ({error})") from error
    if size not in (None, wanted):
        raise ShardDamage(f"has {size:,} bytes, wanted {wanted:,}")
    return Shard(name, entries, wanted, plan)


def read_in_full(folder: Folder, shard: Shard, manifest: Manifest) -> Iterator[int]:
    """Compare every byte of a shard with the digests in its header; yields the bytes read by each request.

    Raises:
        ShardDamage: some byte is not as it was written.
    """
    start = shard.entries[0].offset if shard.entries else shard.size
    relative = [replace(entry, offset=entry.offset - start) for entry in shard.entries]
    yield start
    if bytes(folder.read(shard.name, 0, start)) != _header(relative, manifest, shard.plan):
        raise ShardDamage("is damaged: its header is not as it was written")
    sizes = [Layout.of(manifest, entry.length).size for entry in shard.entries]
    first = 0
    while first < len(sizes):
        last, total = first, 0
        while last < len(sizes) and (last == first or total + sizes[last] <= READ_BYTES):
            total += sizes[last]
            last += 1
        begin = shard.entries[first].offset
        data = memoryview(folder.read(shard.name, begin, begin + total))
        for entry, size in zip(shard.entries[first:last], sizes[first:last], strict=True):
            if hashlib.sha256(data[entry.offset - begin :][:size]).hexdigest() != entry.sha256:
                raise ShardDamage(f"is damaged: document {entry.id!r} does not have its sha256")
        yield total
        first = last
