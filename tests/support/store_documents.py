"""Documents of a feature store, made from their number, and a writer of a store that has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from eagle_plugin.learning.data.store.contents import read_contents
from eagle_plugin.learning.data.store.feature_store import Document, FeatureWriter
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import open_folder
from eagle_plugin.learning.data.store.plan import Run
from eagle_plugin.learning.data.store.shards import Layout, _header

MANIFEST = Manifest(
    target="tiny",
    config_sha256="c",
    weights_sha256="w",
    tokenizer_sha256="t",
    template_sha256="p",
    aux_layers=(1, 2),
    hidden_size=6,
    num_layers=4,
    vocab_size=1 << 20,
    dtype="float32",
    max_length=64,
)


RUN = Run("rows and options")


def make_document(number: int, manifest: Manifest = MANIFEST) -> Document:
    random = torch.Generator().manual_seed(number)
    n = 1 + number * 7 % 23
    width = len(manifest.aux_layers) * manifest.hidden_size
    return Document(
        id=f"row-{number}",
        source="chat" if number % 2 else "code",
        split="val" if number % 5 == 0 else "train",
        ids=torch.randint(manifest.vocab_size, (n,), generator=random),
        mask=torch.arange(n) >= n // 2,
        aux=torch.randn(n, width, generator=random).bfloat16() if width else None,
        last=torch.randn(n, manifest.hidden_size, generator=random).bfloat16(),
    )


def assert_same(found: Document, wanted: Document) -> None:
    for field in dataclasses.fields(Document):
        a, b = getattr(found, field.name), getattr(wanted, field.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a == b


def write_store(
    url: str | Path, numbers: range, shard_bytes: int = 2000, rank: int = 0, world: int = 1, run: str = ""
) -> None:
    """Write the documents of these numbers; calls with the same `run`, by default the numbers, are the same run."""
    place = Run.of(run or str(numbers), rank, world, shard_bytes=shard_bytes)
    with FeatureWriter(url, MANIFEST, place) as writer:
        write_documents(writer, (n for n in numbers if f"row-{n}" not in writer.earlier), shard_bytes)


def write_documents(writer: FeatureWriter, numbers: Iterable[int], shard_bytes: int = 2000) -> None:
    """Plan documents and write those of missing shards."""
    shards: list[list[Document]] = []
    size = shard_bytes
    for document in (make_document(number, writer.manifest) for number in numbers):
        if size >= shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(document)
        size += Layout.of(writer.manifest, len(document.ids)).size
    write_shards(writer, shards)


def write_shards(writer: FeatureWriter, shards: Sequence[Sequence[Document]]) -> None:
    writer.plan([document.id for document in shard] for shard in shards)
    for _ in writer.verify():
        pass
    for name, shard in zip(writer.names, shards, strict=True):
        if name in writer.missing:
            for document in shard:
                writer.add(document)
            writer.finish(name)


def make_store_old(folder: Path) -> None:
    """Rewrite a local store as it was written before there were plans."""
    store = open_folder(folder)
    for name, shard in read_contents(store).shards.items():
        data = store.read(name)
        start = shard.entries[0].offset
        relative = [dataclasses.replace(entry, offset=entry.offset - start) for entry in shard.entries]
        (folder / name).write_bytes(_header(relative, MANIFEST, None) + data[start:])
    for path in folder.glob("plan-*"):
        path.unlink()
