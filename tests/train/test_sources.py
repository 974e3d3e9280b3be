"""The order of documents, their assignment to ranks, and their sources."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_documents import RUN, write_shards
from training_runs import extract_features, recipe, run_training, write_recipe, write_rows

from eagle_plugin import cli
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import Document, FeatureWriter
from eagle_plugin.learning.data.store.manifest import MANIFEST, Manifest
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.document_order import DocumentOrder, Position, assign_documents
from eagle_plugin.learning.train.feed import Feed
from eagle_plugin.learning.train.recipe import DataSettings, TrainError, parse_recipe
from eagle_plugin.learning.train.sources import StoreSource, TargetSource, open_source

CPU = torch.device("cpu")
lengths_of_documents = st.lists(st.integers(1, 300), min_size=1, max_size=700)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(lengths_of_documents, st.integers(1, 500), st.integers(0, 5), st.floats(0.2, 2.5))
def test_an_epoch_takes_every_document_by_its_weight(
    lengths: list[int], batch_tokens: int, seed: int, weight: float
) -> None:
    order = DocumentOrder(lengths, [weight] * len(lengths), seed)
    position, taken = Position(), Counter[int]()
    positions = [position]
    while order.epochs(position) < 1 and position.update < 2000:
        chosen, position = order.next_batch(position, batch_tokens)
        if position.epoch:  # a weight below 1 can leave a first epoch empty
            break
        tokens = sum(lengths[i] for i in chosen)
        assert chosen and (tokens <= batch_tokens or len(chosen) == 1)
        taken.update(chosen)
        positions.append(position)
    assert all(int(weight) <= taken[i] <= int(weight) + 1 for i in range(len(lengths)))
    # A run that starts anywhere in between sees the same documents: only the position matters.
    middle = positions[len(positions) // 2]
    again = DocumentOrder(lengths, [weight] * len(lengths), seed)
    assert again.next_batch(middle, 77) == order.next_batch(middle, 77)


def test_epochs_and_seeds_have_their_own_order() -> None:
    order, other = (DocumentOrder(list(range(1, 200)), [1.0] * 199, seed) for seed in (0, 1))
    first, second = (order.next_batch(Position(epoch=epoch), 10**6)[0] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(199))
    assert first != second and first != other.next_batch(Position(), 10**6)[0] and first != sorted(first)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 400))
)
def test_every_document_is_assigned_once_and_ranks_have_as_many_forwards(
    lengths: list[int], world: int, micro_tokens: int | None
) -> None:
    documents = [100 + i for i in range(len(lengths))]
    shares = assign_documents(documents, lengths, world, micro_tokens)
    assert len(shares) == world and len({len(share) for share in shares}) == 1
    working = [micro for share in shares for micro in share if not micro.idle]
    assert sorted(i for micro in working for i in micro.documents) == documents
    for micro in working:
        tokens = sum(lengths[i - 100] for i in micro.documents)
        assert micro_tokens is None or tokens <= micro_tokens or len(micro.documents) == 1
    assert all(micro.documents for share in shares for micro in share)


def test_stores_mix_by_weight_and_must_agree(features, tmp_path: Path) -> None:
    more = extract_features(write_rows(tmp_path / "more.jsonl", 12, seed=3), features.target, tmp_path / "more")
    data = DataSettings.model_validate({"store": [str(features.store), {"url": str(more), "weight": 0.25}]})
    source = StoreSource(features.target, data)
    assert Counter(item.weight for item in source.items) == {1.0: 48, 0.25: 12}
    document = source.read([len(source.items) - 1])[0]
    assert document.id.startswith("3-") and document.aux is not None
    source.close()

    narrow = extract_features(features.rows, features.target, tmp_path / "narrow", aux_layers="1,2")
    data = DataSettings.model_validate({"store": [str(features.store), str(narrow)]})
    with pytest.raises(TrainError, match=r"aux_layers \(1, 2\), not \(2, 3, 4\)"):
        StoreSource(features.target, data)


def test_store_of_another_target_is_refused(features, tmp_path: Path) -> None:
    other = tiny_models.tiny_llama(tmp_path / "other", seed=5)
    with pytest.raises(DataError, match="another target"):
        StoreSource(other, DataSettings.model_validate({"store": str(features.store)}))


def test_store_that_is_not_whole_is_refused_before_training(
    features, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Path(shutil.copytree(features.store, tmp_path / "store"))
    shard = store / "shard-000-000000.safetensors"
    file = write_recipe(tmp_path / "r.yaml", recipe(features.target, store))
    for harm, wanted in (
        (lambda: shard.write_bytes(shard.read_bytes()[:-1000]), f"{shard.name} has"),
        (shard.unlink, f"{shard.name} is missing"),
    ):
        harm()
        assert cli.main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"error: {store} is not whole: {wanted}" in error
        assert "run the same `eagle-plugin data features` command again" in error
    assert not (tmp_path / "run" / "logs").exists()
    extract_features(features.rows, features.target, store)
    assert shard.read_bytes() == (features.store / shard.name).read_bytes()


def test_head_of_other_layers_is_refused(features, tmp_path: Path) -> None:
    start = run_training(tmp_path, "start", recipe(features.target, features.store, budget={"updates": 0}))
    other = extract_features(features.rows, features.target, tmp_path / "other", aux_layers="1,3,5")
    with pytest.raises(TrainError, match="layers 2,3,4, and the features hold 1,3,5"):
        run_training(tmp_path, "tuned", recipe(features.target, other, head={"from": str(start / "head")}))


def test_target_gives_the_features_of_the_store(features) -> None:
    stored = StoreSource(features.target, DataSettings.model_validate({"store": str(features.store)}))
    live = TargetSource(features.target, DataSettings.model_validate({"rows": str(features.rows)}), torch.float32, CPU)
    by_id = {item.id.removeprefix("0/"): i for i, item in enumerate(stored.items)}
    wanted = range(0, len(live.items), 5)
    for document in live.read(list(wanted)):  # of unequal lengths: padding must not change anything
        twin = stored.read([by_id[document.id]])[0]
        assert document.ids.equal(twin.ids) and document.mask.equal(twin.mask) and document.split == twin.split
        torch.testing.assert_close(document.aux, twin.aux, rtol=2e-2, atol=1e-3)
        torch.testing.assert_close(document.last, twin.last, rtol=2e-2, atol=1e-3)
    stored.close()
    live.close()


def test_training_from_rows_learns_what_training_from_the_store_does(features, tmp_path: Path) -> None:
    values = recipe(features.target, features.store)
    stored = run_training(tmp_path, "stored", values)
    live = run_training(tmp_path, "live", values | {"data": {"rows": str(features.rows)}})
    ours, theirs = (run / "logs" / "train.csv" for run in (live, stored))
    first = [path.read_text().splitlines()[1].split(",") for path in (ours, theirs)]
    assert first[0][:3] == first[1][:3]  # the same documents in the same order
    assert float(first[0][5]) == pytest.approx(float(first[1][5]), rel=1e-3)


def test_data_without_a_split_is_refused(features, tmp_path: Path) -> None:
    all_held_out = write_rows(tmp_path / "val.jsonl", 4, val_every=1)
    store = extract_features(all_held_out, features.target, tmp_path / "val")
    with pytest.raises(TrainError, match="no document of split train"):
        open_source(
            features.target, DataSettings.model_validate({"store": str(store)}), torch.float32, Ranks(0, 1, CPU)
        )
    none_held_out = write_rows(tmp_path / "train.jsonl", 4, val_every=100)
    lines = none_held_out.read_text().replace('"val"', '"train"')
    none_held_out.write_text(lines)
    store = extract_features(none_held_out, features.target, tmp_path / "train")
    with pytest.raises(TrainError, match="eval_tokens to 0"):
        run_training(tmp_path, "run", recipe(features.target, store))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_store_may_be_larger_than_what_is_kept_in_memory(features, tmp_path: Path) -> None:
    written = Manifest.from_json((features.store / MANIFEST).read_bytes(), "store")
    manifest = replace(written, hidden_size=2048)
    with FeatureWriter(tmp_path / "large", manifest, RUN) as writer:
        ids, mask = torch.arange(100), torch.arange(100) >= 10
        aux, last = torch.ones(100, 3 * 2048, dtype=torch.bfloat16), torch.ones(100, 2048, dtype=torch.bfloat16)
        documents = [Document(str(i), "test", "train", ids, mask, aux, last) for i in range(160)]
        write_shards(writer, [documents[i : i + 5] for i in range(0, 160, 5)])
    size = sum(path.stat().st_size for path in (tmp_path / "large").iterdir())
    assert size > 250e6
    values = recipe(features.target, tmp_path / "large", eval_tokens=0, batch_tokens=400, budget={"epochs": 2})
    source = StoreSource(features.target, DataSettings.model_validate({"store": str(tmp_path / "large")}))
    feed = Feed(parse_recipe(values, "recipe"), source, Ranks(0, 1, CPU))
    tokens, before, peak = 0, 0, 0
    with feed.open(Position()) as steps:
        for step, batches in steps:
            tokens += sum(len(batch) for batch in batches)
            before = before or resident_bytes()
            peak = max(peak, resident_bytes())
            assert step.after.tokens == tokens
    source.close()
    assert tokens == 2 * 160 * 100
    assert peak - before < size / 3
