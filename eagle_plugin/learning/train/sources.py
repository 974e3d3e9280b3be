"""Where documents come from: feature stores made beforehand, or token rows sent through the target while training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from eagle_plugin.heads.files import read_tensors
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.learning.data.provenance import Sources, Terms, count_sources, join_sources, read_sources
from eagle_plugin.learning.data.rows import MIN_RESPONSE, TokenRow, read_rows
from eagle_plugin.learning.data.store.feature_store import Document, Entry, FeatureStore
from eagle_plugin.learning.data.store.features import Readout, Taps, default_aux_layers, load_target
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.train.recipe import DataSettings, TrainError

READERS = 8  # threads: remote stores answer slowly, and a request is for one document


@dataclass(frozen=True)
class Item:
    """What the order of an epoch needs to know of a document."""

    id: str
    split: str
    length: int  # tokens
    weight: float  # how often an epoch takes it


class Source(Protocol):
    """Documents by index. `items` is the same list in every process and every run over the same data."""

    items: list[Item]
    aux_layers: tuple[int, ...]
    concurrent: bool  # whether reading may overlap with training
    terms: Sources  # of every source of the documents

    def read(self, indices: Sequence[int]) -> list[Document]: ...

    def readout(self) -> Readout:
        """How the target's logits come from `Document.last`."""
        ...

    def count(self) -> dict[str, dict[str, Any]]:
        """The documents of split train by source, as `count_sources` returns them, under `terms`."""
        ...

    def close(self) -> None: ...


class StoreSource:
    """The documents of one or several feature stores of the same target."""

    concurrent = True

    def __init__(self, target: Path, settings: DataSettings) -> None:
        self._stores = [FeatureStore(part.url, cache=settings.cache) for part in settings.store]
        first = self._stores[0].manifest
        for part, store in zip(settings.store, self._stores, strict=True):
            store.manifest.check_target(target)
            _check_same_features(settings.store[0].url, first, part.url, store.manifest)
        self._target, self._manifest = target, first
        self.aux_layers = first.aux_layers
        places: list[tuple[Item, FeatureStore, Entry]] = []
        for number, (part, store) in enumerate(zip(settings.store, self._stores, strict=True)):
            for entry in sorted(store.entries, key=lambda entry: entry.id):
                if entry.n_response >= MIN_RESPONSE:
                    item = Item(f"{number}/{entry.id}", entry.split, entry.length, part.weight)
                    places.append((item, store, entry))
        self.items = [item for item, _, _ in places]
        self._places = [(store, entry) for _, store, entry in places]
        self.terms = join_sources(*(store.terms() for store in self._stores))
        self._pool = ThreadPoolExecutor(READERS, "feature-reader")

    def read(self, indices: Sequence[int]) -> list[Document]:
        places = [self._places[i] for i in indices]
        return list(self._pool.map(lambda place: place[0].read(place[1]), places))

    def readout(self) -> Readout:
        # From the files: the model itself may be too large to load here.
        weight, bias = TargetFiles(self._target).lm_head(), _read_lm_head_bias(self._target)
        return Readout(weight, bias, self._manifest.logit_factor, self._manifest.softcap)

    def count(self) -> dict[str, dict[str, Any]]:
        learnt = (entry for _, entry in self._places if entry.split == "train")
        return count_sources(((entry.source, entry.length, entry.n_response) for entry in learnt), self.terms)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class TargetSource:
    """Token rows whose features the target computes when they are needed (nothing is stored)."""

    # On a CPU the target and the head would compete for the same cores.
    concurrent = False

    def __init__(self, target: Path, settings: DataSettings, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        model = load_target(target, dtype, device)
        layers, depth = settings.aux_layers, model.config.get_text_config().num_hidden_layers
        self.aux_layers = default_aux_layers(depth) if layers is None else tuple(layers)
        self._taps = Taps(model, self.aux_layers)
        self._rows: list[TokenRow] = []
        self.items = []
        self.terms: Sources = {}
        seen: set[str] = set()
        for path in settings.rows:
            known = read_sources(path)
            for row in read_rows(path):
                terms = known.get(row.source, Terms())
                if self.terms.get(row.source) != terms:
                    self.terms = join_sources(self.terms, {row.source: terms})
                if row.id in seen:
                    raise TrainError(f"{path} has row {row.id!r} a second time; give every row its own id")
                seen.add(row.id)
                if max((*row.prompt_ids, *row.response_ids), default=0) >= len(self._taps.readout.weight):
                    raise TrainError(
                        f"{path}: row {row.id!r} has a token beyond the target's vocabulary of "
                        f"{len(self._taps.readout.weight):,}; generate the rows with this target"
                    )
                length = min(len(row.prompt_ids) + len(row.response_ids), settings.max_length)
                if length - len(row.prompt_ids) >= MIN_RESPONSE:
                    self._rows.append(row)
                    self.items.append(Item(row.id, row.split, length, 1.0))

    @torch.inference_mode()
    def read(self, indices: Sequence[int]) -> list[Document]:
        rows = [self._rows[i] for i in indices]
        lengths = [self.items[i].length for i in indices]
        tokens = [(row.prompt_ids + row.response_ids)[:n] for row, n in zip(rows, lengths, strict=True)]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)  # [b, n]; padded on the right
        for i, row in enumerate(tokens):
            ids[i, : len(row)] = torch.tensor(row)
        aux, last = self._taps.run(ids.to(self._device), lengths)
        return [
            Document(
                id=row.id,
                source=row.source,
                split=row.split,
                ids=ids[i, :n],
                mask=torch.arange(n) >= len(row.prompt_ids),
                aux=None if aux is None else aux[i, :n].to(torch.bfloat16),
                last=last[i, :n].to(torch.bfloat16),
            )
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]

    def readout(self) -> Readout:
        return self._taps.readout

    def count(self) -> dict[str, dict[str, Any]]:
        pairs = [pair for pair in zip(self._rows, self.items, strict=True) if pair[0].split == "train"]
        counted = ((row.source, item.length, item.length - len(row.prompt_ids)) for row, item in pairs)
        return count_sources(counted, self.terms)

    def close(self) -> None:
        self._taps.close()


def open_source(target: Path, settings: DataSettings, dtype: torch.dtype, device: torch.device) -> Source:
    """Open what a recipe's `data` names.

    Raises:
        TrainError, DataError: it is missing, empty, damaged, or of another target.
    """
    source: Source = StoreSource(target, settings) if settings.store else TargetSource(target, settings, dtype, device)
    if not any(item.split == "train" for item in source.items):
        where = ", ".join(part.url for part in settings.store) or ", ".join(map(str, settings.rows))
        raise TrainError(
            f"{where} has no document of split train with {MIN_RESPONSE} response tokens or more; "
            "generate more rows and extract their features"
        )
    return source


def digest_items(items: Iterable[Item]) -> str:
    """sha256 that is equal if two runs have the same documents."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.id}\0{item.split}\0{item.length}\0{item.weight}\n".encode())
    return digest.hexdigest()


def _check_same_features(first_url: str, first: Manifest, url: str, manifest: Manifest) -> None:
    wrong = [
        f"{name} {getattr(manifest, name)!r}, not {getattr(first, name)!r}"
        for name in ("aux_layers", "hidden_size", "logit_factor", "softcap")
        if getattr(manifest, name) != getattr(first, name)
    ]
    if wrong:
        raise TrainError(
            f"{url} holds features with {'; '.join(wrong)} of {first_url}; extract both stores with the same settings"
        )


def _read_lm_head_bias(target: Path) -> Tensor | None:
    for name, stored in read_tensors(target).items():
        if name.endswith("lm_head.bias"):
            with safe_open(str(stored.file), framework="pt") as file:
                bias: Tensor = file.get_tensor(name)
                return bias
    return None


def mask_out(document: Document) -> Document:
    """The same document without rows to train on, for a rank that has no documents left."""
    # A row needs the two tokens after it, so two tokens have no row, whatever the weight of prompts is.
    aux = None if document.aux is None else document.aux[:2]
    mask = torch.zeros_like(document.mask[:2])
    return replace(document, ids=document.ids[:2], mask=mask, aux=aux, last=document.last[:2])
