"""Documents of a feature store, made from their number, and a writer of a store that has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from eagle_plugin.data.store.feature_store import Document, FeatureWriter
from eagle_plugin.data.store.manifest import Manifest

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


def write_store(url: str | Path, numbers: range, shard_bytes: int = 2000, rank: int = 0) -> None:
    with FeatureWriter(url, MANIFEST, rank, shard_bytes) as writer:
        for number in numbers:
            if f"row-{number}" not in writer.done:
                writer.add(make_document(number))
