"""`train` reads what servers have written: the same heads as from the reference's store."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kept_documents import keep_document, write_kept
from training_runs import extract_features, recipe, run_training, weights, write_rows

from eagle_plugin.learning.data.collecting.completion import GrowingStore
from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.store.feature_store import FeatureStore

KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"head": {"kind": "eagle3"}},
    "eagle2": {"head": {"kind": "eagle2"}},
    "peagle": {"head": {"kind": "peagle", "layers": 1, "mask_token_id": 2}},
    "dflash": {"head": {"kind": "dflash", "layers": 1, "mask_token_id": 2}},
}


@pytest.fixture(scope="module")
def reference(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    return extract_features(write_rows(folder / "rows.jsonl", 24), tiny_target, folder / "store")


def collected(reference: Path, target: Path, folder: Path, unknown: int = 1, fill: float = 0.0) -> Path:
    """The store that servers write for the same rows: the states of the last `unknown` tokens of each are `fill`."""
    store = FeatureStore(reference)
    shards = OpenShards(str(folder), store.manifest, 1 << 20)
    for entry in sorted(store.entries, key=lambda entry: entry.id):
        document = store.read(entry)
        assert document.aux is not None
        aux, last = document.aux.clone(), document.last.clone()
        aux[len(aux) - unknown :], last[len(last) - unknown :] = fill, fill
        keep_document(shards, dataclasses.replace(document, aux=aux, last=last))
    write_kept(shards)
    growing = GrowingStore(str(folder), target)
    growing.look()
    assert growing.complete()[0] == len(store.entries)
    return folder


def trained(folder: Path, name: str, target: Path, store: Path, kind: str) -> bytes:
    values = recipe(target, store, **KINDS[kind]) | {"budget": {"updates": 4}, "seed": 3}
    run = run_training(folder, name, values)
    return weights(run)


@pytest.mark.parametrize(
    "kind", [one if one == "eagle3" else pytest.param(one, marks=pytest.mark.matrix) for one in KINDS]
)
def test_nobody_reads_the_state_of_an_answers_last_token(
    kind: str, reference: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """An engine does not compute it: whatever is there, the same head is trained."""
    wanted = trained(tmp_path, "wanted", tiny_target, reference, kind)
    zeros = collected(reference, tiny_target, tmp_path / "zeros")
    assert trained(tmp_path, "zeros", tiny_target, zeros, kind) == wanted
    large = collected(reference, tiny_target, tmp_path / "large", fill=50.0)
    assert trained(tmp_path, "large", tiny_target, large, kind) == wanted
    more = collected(reference, tiny_target, tmp_path / "more", unknown=2, fill=50.0)
    assert trained(tmp_path, "more", tiny_target, more, kind) != wanted, "the states before it are read"
