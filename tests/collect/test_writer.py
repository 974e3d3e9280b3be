"""The writer of a store: what it writes and drops, beside other writers, and when its disk is full."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from store_documents import MANIFEST, make_document, write_store
from tiny_models import tiny_llama

from eagle_plugin.collect.metrics import REASONS, CountCollector, CountFile
from eagle_plugin.collect.recorder import Collected, FeatureRecorder, writer_kind
from eagle_plugin.collect.settings import CollectError, CollectSettings, StatesFacts, collect_settings
from eagle_plugin.learning.data.collecting.completion import GrowingStore
from eagle_plugin.learning.data.collecting.shards import LEAST_FREE, RANK, OpenShards
from eagle_plugin.learning.data.collecting.writer import document_of
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import DISK_FULL, LocalFolder
from eagle_plugin.traffic.served import ServedTarget
from eagle_plugin.traffic.writer_process import check_writer

HIDDEN = 6


def collected(ids: list[int], prompt: int, given: bool = False, states: int | None = None) -> Collected:
    n = len(ids) if states is None else states
    return Collected("doc", "s", "train", ids, prompt, given, torch.arange(3 * HIDDEN * n).view(n, -1).bfloat16())


def test_documents_as_the_store_has_them() -> None:
    found = document_of(collected([*range(20)], 5), HIDDEN, 100)
    assert not isinstance(found, str) and found.aux is not None
    assert found.ids.tolist() == [*range(20)] and found.mask.tolist() == [False] * 5 + [True] * 15
    assert found.aux.shape == (20, 2 * HIDDEN) and found.last.shape == (20, HIDDEN)
    assert torch.equal(found.last[3], (torch.arange(3 * 18 + 12, 3 * 18 + 18)).bfloat16())
    cut = document_of(collected([*range(20)], 5, states=12), HIDDEN, 12)
    assert not isinstance(cut, str) and len(cut.ids) == len(cut.last) == 12
    assert document_of(collected([*range(20)], 15), HIDDEN, 100) == "too_short"
    assert document_of(collected([1] * 5 + [7] * 128, 5), HIDDEN, 500) == "looping"
    assert not isinstance(document_of(collected([1] * 5 + [7] * 128, 5, given=True), HIDDEN, 500), str)
    assert document_of(collected([*range(20)], 11, given=True), HIDDEN, 12) == "too_short"
    assert document_of(collected([*range(20)], 5, states=19), HIDDEN, 100) == "incomplete"


def test_a_store_without_aux_states() -> None:
    found = document_of(collected([*range(20)], 5)._replace(states=torch.zeros(20, HIDDEN)), HIDDEN, 100)
    assert not isinstance(found, str) and found.aux is None and found.last.shape == (20, HIDDEN)


def rows_of(numbers: range) -> list[TokenRow]:
    documents = [make_document(number) for number in numbers]
    return [
        TokenRow(one.id, one.source, one.ids[~one.mask].tolist(), one.ids[one.mask].tolist(), "stop")
        for one in documents
    ]


def growing(store: Path, monkeypatch: pytest.MonkeyPatch) -> GrowingStore:
    monkeypatch.setattr(Manifest, "check_target", lambda *_: None)
    found = GrowingStore(store, "target")
    found.look()
    return found


def test_two_servers_write_beside_each_other_until_the_store_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path, range(4))  # of `data features`, before
    first, second = (OpenShards(str(tmp_path), MANIFEST, 2000) for _ in range(2))
    for number in range(4, 12):
        (first, second)[number % 2].add(make_document(number))
    listed = LocalFolder(tmp_path).names()
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "names", lambda self: listed)  # both find the same number free
        first.flush()
        second.flush()
    with pytest.raises(DataError, match="is missing; run the same"):
        FeatureStore(tmp_path)
    store = growing(tmp_path, monkeypatch)
    assert store.missing(rows_of(range(12))) == [] and len(store.missing(rows_of(range(15)))) == 3
    assert store.complete() == (12, [])
    assert {entry.id for entry in FeatureStore(tmp_path).entries} == {f"row-{number}" for number in range(12)}
    plans = sorted(path.name for path in tmp_path.glob("plan-*"))
    assert store.complete() == (12, []) and sorted(path.name for path in tmp_path.glob("plan-*")) == plans
    # Other rows may be added by either way.
    first.add(make_document(20))
    first.flush()
    assert growing(tmp_path, monkeypatch).complete() == (13, [])
    write_store(tmp_path, range(20, 23))
    assert len(FeatureStore(tmp_path).entries) == 15


def test_lost_and_damaged_shards_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = OpenShards(str(tmp_path), MANIFEST, 2000)
    for number in range(6):
        shards.add(make_document(number))
        if number % 2:
            shards.flush()
    growing(tmp_path, monkeypatch).complete()
    name = sorted(path.name for path in tmp_path.glob("shard-*"))[1]
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-8])
    with pytest.raises(DataError, match=f"{name} has .* bytes, wanted"):
        FeatureStore(tmp_path)
    store = growing(tmp_path, monkeypatch)
    assert [row.id for row in store.missing(rows_of(range(2, 6)))] == ["row-2", "row-3"]
    # What is collected again comes under another name; meanwhile the damaged shard may be gone or not.
    for number in (2, 3):
        shards.add(make_document(number))
    shards.flush()
    store.look()
    assert store.missing(rows_of(range(6))) == [] and store.complete() == (6, [name])
    assert len(FeatureStore(tmp_path).entries) == 6
    newest = sorted(tmp_path.glob("shard-*"))[-1]
    newest.unlink()
    shards.add(make_document(2))
    shards.flush()
    assert not newest.exists(), "the name of a lost shard is not used again"
    assert growing(tmp_path, monkeypatch).complete() == (5, [newest.name])


def test_a_store_that_data_features_has_not_finished_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path, range(12))
    lost = sorted(tmp_path.glob("shard-000-*"))[1]
    lost.unlink()
    store = growing(tmp_path, monkeypatch)
    with pytest.raises(DataError, match=rf"{lost.name}, which is missing: run the `data features` command"):
        store.complete()


def test_a_store_leaves_room_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = OpenShards(str(tmp_path), MANIFEST, 2000)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=LEAST_FREE + 100))
    shards.add(make_document(1))
    with pytest.raises(DataError, match="has 1,024 MiB left, of which a store leaves 1,024; make room there"):
        shards.flush()
    assert not list(tmp_path.glob("shard-*"))
    monkeypatch.undo()
    shards.add(make_document(2))
    assert shards.flush()[0] == 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    OpenShards(str(tmp_path), MANIFEST, 2000)
    for change in ({"hidden_size": 8}, {"aux_layers": (1, 3)}, {"weights_sha256": "x"}):
        with pytest.raises(DataError, match=f"holds features with {next(iter(change))}"):
            OpenShards(str(tmp_path), Manifest(**{**vars(MANIFEST), **change}), 2000)


@pytest.fixture
def settings(tmp_path: Path) -> CollectSettings:
    target = tiny_llama(tmp_path / "target")
    served = ServedTarget.of(str(target))
    facts = StatesFacts(served, (2, 3), "float32", HIDDEN, 7, 512)
    return CollectSettings(str(tmp_path / "store"), facts=facts)


def wait_for(recorder: FeatureRecorder, name: str, count: int) -> None:
    end = time.monotonic() + 60
    while recorder.totals()[name] < count:
        assert time.monotonic() < end, recorder.totals()
        time.sleep(0.05)


def frame(number: int) -> Any:
    return collected([number, *range(19)], 5)._replace(id=f"doc-{number}").frame()


def test_the_process_writes_what_it_is_sent_when_no_more_comes(settings: CollectSettings) -> None:
    recorder = FeatureRecorder(settings)
    for number in range(3):
        recorder.offer(frame(number))
    wait_for(recorder, "documents", 3)  # nobody has ended it
    recorder.offer(frame(3))
    recorder.close(20)
    assert recorder.totals()["documents"] == 4 and recorder.totals()["tokens"] == 80
    names = sorted(path.name for path in Path(settings.url).glob("shard-*"))
    assert len(names) == 2 and all(name.startswith(f"shard-{RANK}-") for name in names)
    assert {path.stat().st_mode & 0o077 for path in Path(settings.url).iterdir()} == {0}, "readable by others"


def test_a_full_disk_drops_what_it_cannot_take_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = OpenShards(str(tmp_path), MANIFEST, 2000)

    def full(path: Path, data: bytes) -> None:
        raise OSError(DISK_FULL[0], "no space")

    with monkeypatch.context() as patch:
        patch.setattr("eagle_plugin.learning.data.store.objects.create_file", full)
        shards.add(make_document(0))
        with pytest.raises(DataError, match="the disk of .* is full"):
            shards.flush()
    shards.add(make_document(1))
    assert shards.flush()[0] == 1 and shards.waiting == 0


def test_the_process_refuses_in_one_sentence(settings: CollectSettings, tmp_path: Path) -> None:
    check_writer(writer_kind(settings))
    assert settings.facts is not None
    wider = settings.with_facts(StatesFacts(**{**vars(settings.facts), "hidden_size": 8}))
    with pytest.raises(CollectError, match="EAGLE_FEATURES: .* holds features with hidden_size 6, not 8"):
        check_writer(writer_kind(wider))
    nameless = settings.with_facts(StatesFacts(**{**vars(settings.facts), "served": ServedTarget("x", "org/x")}))
    with pytest.raises(CollectError, match=r"org/x is no folder with a config.json .* unset EAGLE_FEATURES"):
        check_writer(writer_kind(nameless))


def test_every_reason_has_a_series_before_the_first_document_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    collector = CountCollector({file: {"model_name": "m"}, tmp_path / "none": {"model_name": "m"}})
    assert [len(family.samples) for family in collector.collect()] == [0, 0, 0, 0]
    CountFile(file).update(Counter({"dropped:queue_full": 2}))
    *_, dropped = collector.collect()
    found = {sample.labels["reason"]: sample.value for sample in dropped.samples}
    assert found == dict.fromkeys(REASONS, 0) | {"queue_full": 2}
    assert {"queue_full", "write_error", "failed", "writer_ended"} <= set(REASONS)  # deploy/config/alerts.yml


def test_settings() -> None:
    given = {"EAGLE_FEATURES": "/data/f", "EAGLE_FEATURES_MAX_LENGTH": "4096", "EAGLE_FEATURES_SHARD_MIB": "64"}
    found = collect_settings(given)
    assert found is not None and (found.url, found.max_length, found.shard_mib) == ("/data/f", 4096, 64)
    assert collect_settings({}) is None and CollectSettings.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["queue_mib"] == 1024 and found.states == "bfloat16"
    half = collect_settings(given | {"EAGLE_FEATURES_STATES": "float8"})
    assert half is not None and half.states == "float8" == CollectSettings.from_json(half.to_json()).states
    for wrong, sentence in (
        ({"EAGLE_FEATURES": "f"}, "EAGLE_FEATURES is f, wanted a URL or a folder from the root on"),
        ({"EAGLE_FEATURES_LENGTH": "3"}, "EAGLE_FEATURES_LENGTH is not a setting of EAGLE_FEATURES, wanted one of"),
        (given | {"EAGLE_FEATURES_QUEUE_MIB": "0"}, "EAGLE_FEATURES_QUEUE_MIB is 0, wanted a whole number above 0"),
        (given | {"EAGLE_FEATURES_STATES": "fp8"}, "EAGLE_FEATURES_STATES is fp8, wanted bfloat16 or float8"),
    ):
        with pytest.raises(CollectError, match=sentence):
            collect_settings(wrong)
