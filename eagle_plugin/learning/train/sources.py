"""Where documents come from: feature stores made beforehand, or token rows whose states are computed while training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from eagle_plugin.heads.files import read_tensors
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.learning.data.collecting.completion import read_manifest
from eagle_plugin.learning.data.provenance import Sources, count_sources, join_sources
from eagle_plugin.learning.data.rows import MIN_RESPONSE
from eagle_plugin.learning.data.store.feature_store import Document, Entry, FeatureStore
from eagle_plugin.learning.data.store.features import Readout, Taps, default_aux_layers, load_target
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import open_folder
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.online import OnlineSource
from eagle_plugin.learning.train.recipe import DataSettings, TrainError
from eagle_plugin.learning.train.row_list import Item, RowList

READERS = 8  # threads: remote stores answer slowly, and a request is for one document
GPU_READERS = 2  # batches at the same time for a GPU; each further one is an update more in its memory
HELD_OUT_BYTES = 2**31  # most of held-out documents in memory; 20,000 tokens of an 8B model are 655 MB


class Source(Protocol):
    """Documents by index. `items` is the same list in every process and every run over the same data."""

    items: list[Item]
    aux_layers: tuple[int, ...]
    readers: int  # batches that are read at the same time while the head computes; 0: reading may not overlap with it
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
    """The documents of one or several feature stores of the same target.

    Held-out documents are the same in every evaluation and stay in memory, up to `HELD_OUT_BYTES`.

    for_gpu: documents of float8 stores stay in float8 until they are on the GPU, which expands them faster.
    """

    def __init__(self, target: Path, settings: DataSettings, readers: int = 1, for_gpu: bool = False) -> None:
        self.readers, cached = readers, int(settings.cache_gib * 2**30)
        self._stores = [FeatureStore(part.url, settings.cache, cached) for part in settings.store]
        first = self._stores[0].manifest
        for part, store in zip(settings.store, self._stores, strict=True):
            store.manifest.check_target(target)
            _check_same_features(settings.store[0].url, first, part.url, store.manifest)
        # Documents of both forms may be in one batch.
        self._as_stored = for_gpu and all(store.manifest.states == "float8" for store in self._stores)
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
        self._held_out: dict[int, Document] = {}
        self._room = HELD_OUT_BYTES
        self._pool = ThreadPoolExecutor(READERS, "feature-reader")

    def read(self, indices: Sequence[int]) -> list[Document]:
        missing = [i for i in indices if i not in self._held_out]
        found = dict(zip(missing, self._pool.map(self._read_one, missing), strict=True))
        for i, document in found.items():
            if self.items[i].split == "val" and document.nbytes <= self._room:
                self._room -= document.nbytes
                self._held_out[i] = document
        return [found[i] if i in found else self._held_out[i] for i in indices]

    def _read_one(self, index: int) -> Document:
        store, entry = self._places[index]
        return store.read(entry, self._as_stored)

    def readout(self) -> Readout:
        return read_readout(self._target, self._manifest)

    def count(self) -> dict[str, dict[str, Any]]:
        learnt = (entry for _, entry in self._places if entry.split == "train")
        return count_sources(((entry.source, entry.length, entry.n_response) for entry in learnt), self.terms)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class TargetSource:
    """Token rows whose features the target computes when they are needed (nothing is stored)."""

    # On a CPU the target and the head would compete for the same cores.
    readers = 0

    def __init__(self, target: Path, settings: DataSettings, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        model = load_target(target, dtype, device)
        layers, depth = settings.aux_layers, model.config.get_text_config().num_hidden_layers
        self.aux_layers = default_aux_layers(depth) if layers is None else tuple(layers)
        self._taps = Taps(model, self.aux_layers)
        self._list = RowList(settings.rows, len(self._taps.readout.weight), settings.max_length)
        self.items, self.terms = self._list.items, self._list.terms

    @torch.inference_mode()
    def read(self, indices: Sequence[int]) -> list[Document]:
        rows = [self._list.rows[i] for i in indices]
        lengths = [self.items[i].length for i in indices]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)  # [b, n]; padded on the right
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = torch.tensor(row.ids.tolist())
        aux, last = self._taps.run(ids.to(self._device), lengths)
        return [
            Document(
                id=row.id,
                source=row.source,
                split=row.split,
                ids=ids[i, :n],
                mask=row.mask(),
                aux=None if aux is None else aux[i, :n].to(torch.bfloat16),
                last=last[i, :n].to(torch.bfloat16),
            )
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]

    def readout(self) -> Readout:
        return self._taps.readout

    def count(self) -> dict[str, dict[str, Any]]:
        return self._list.count()

    def close(self) -> None:
        self._taps.close()


def open_source(target: Path, settings: DataSettings, dtype: torch.dtype, ranks: Ranks) -> Source:
    """Open what a recipe's `data` names; every process of a run does so at the same time.

    Raises:
        TrainError, DataError: it is missing, empty, damaged, or of another target.
    """
    source: Source
    if settings.store:
        on_gpu = ranks.device.type == "cuda"
        source = StoreSource(target, settings, GPU_READERS if on_gpu else 1, on_gpu)
    elif settings.online:
        manifest = read_manifest(open_folder(settings.online.store), target)
        source = OnlineSource(settings, manifest, read_readout(target, manifest), ranks)
    else:
        source = TargetSource(target, settings, dtype, ranks.device)
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


def read_readout(target: Path, manifest: Manifest) -> Readout:
    """How logits come from stored states. From the files: the target itself may be too large to load here."""
    weight, bias = TargetFiles(target).lm_head(), _read_lm_head_bias(target)
    return Readout(weight, bias, manifest.logit_factor, manifest.softcap)


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
    document = document.cut(2)
    return replace(document, mask=torch.zeros_like(document.mask))
