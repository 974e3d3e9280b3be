"""The writer of a store: what it writes and drops, beside other writers, and when its disk is full."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_documents import keep_document, write_kept
from store_documents import MANIFEST, make_document, write_store
from tiny_models import tiny_llama

from eagle_plugin.collect.metrics import REASONS, CountCollector, CountFile
from eagle_plugin.collect.recorder import Collected, FeatureRecorder, Rows, writer_kind
from eagle_plugin.collect.settings import (
    CollectError,
    CollectSettings,
    StatesFacts,
    collect_settings,
    default_queue_mib,
)
from eagle_plugin.common.host_memory import memory_bytes
from eagle_plugin.learning.data.collecting.completion import GrowingStore
from eagle_plugin.learning.data.collecting.pipe import Pipe
from eagle_plugin.learning.data.collecting.shards import LEAST_FREE, RANK, OpenShards
from eagle_plugin.learning.data.collecting.writer import DocumentWriter
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.store.feature_store import Document, FeatureStore
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import DISK_FULL, LocalFolder
from eagle_plugin.traffic.frames import pack_counts
from eagle_plugin.traffic.served import ServedTarget
from eagle_plugin.traffic.writer_process import check_writer

HIDDEN = 6


def collected(ids: list[int], prompt: int, given: bool = False, rows: int | None = None, id: str = "doc") -> Collected:
    """A request whose states are counted; in two parts, as of two steps."""
    n = len(ids) if rows is None else rows
    states = torch.arange(3 * HIDDEN * n).view(n, -1).bfloat16()
    parts = [Rows(part[:, :-HIDDEN].contiguous(), part[:, -HIDDEN:].contiguous()) for part in states.split([3, n - 3])]
    return Collected(id, "s", "train", ids, prompt, given, parts)


def written(folder: Path, sent: list[Collected], **keys: Any) -> tuple[Counter[str], list[Document]]:
    """What the writer of a store makes of what it is sent: its counts and the documents."""
    manifest = Manifest(**{**vars(MANIFEST), **keys})
    out, into = os.pipe()
    writer = DocumentWriter(OpenShards(str(folder), manifest, 2000))

    def send() -> None:
        with open(into, "wb") as pipe:
            for one in sent:
                pipe.writelines(one.frame())
                pipe.write(pack_counts({"dropped:queue_full": 1}))

    thread = threading.Thread(target=send)
    thread.start()
    writer.run(Pipe(out))
    thread.join()
    os.close(out)
    if not any(folder.glob("shard-*")):
        return writer.counts, []
    with pytest.MonkeyPatch.context() as patch:
        store = growing(folder, patch)
        store.complete()
    store = FeatureStore(folder)
    return writer.counts, [store.read(entry) for entry in store.entries]


def test_documents_as_the_store_has_them(tmp_path: Path) -> None:
    counts, (found,) = written(tmp_path, [collected([*range(20)], 5)])
    assert found.aux is not None and counts == {"documents": 1, "tokens": 20, "bytes": 20 * (36 + 5) + 4}
    assert found.ids.tolist() == [*range(20)] and found.mask.tolist() == [False] * 5 + [True] * 15
    states = torch.arange(3 * HIDDEN * 20).view(20, -1).bfloat16()
    assert torch.equal(found.aux, states[:, :-HIDDEN]) and torch.equal(found.last, states[:, -HIDDEN:])
    counts, (cut,) = written(tmp_path / "cut", [collected([*range(20)], 5, rows=12)], max_length=12)
    assert cut.ids.tolist() == [*range(12)] and torch.equal(cut.last, states[:12, -HIDDEN:])
    half = written(tmp_path / "half", [collected([*range(20)], 5)], states="float8")[1][0]
    assert torch.equal(half.ids, found.ids) and torch.equal(half.mask, found.mask) and half.aux is not None
    torch.testing.assert_close(half.aux, found.aux, rtol=1 / 16, atol=1)


@pytest.mark.parametrize("states", ["bfloat16", "float8"])
def test_all_answers_of_a_dialogue_are_marked(tmp_path: Path, states: str) -> None:
    sent = replace(collected([*range(20)], 15, given=True), earlier=[(3, 6), (8, 9)])
    (found,) = written(tmp_path, [sent], states=states)[1]
    assert found.mask.nonzero()[:, 0].tolist() == [3, 4, 5, 8, 15, 16, 17, 18, 19]
    assert FeatureStore(tmp_path).entries[0].n_response == 9


def test_what_is_left_out_and_what_comes_after_it(tmp_path: Path) -> None:
    sent = [
        collected([*range(20)], 15, id="short"),
        collected([1] * 5 + [7] * 128, 5, id="loop"),
        collected([1] * 5 + [7] * 128, 5, given=True, id="a loop that was given"),
        collected([*range(20)], 5, rows=19, id="not whole"),
        collected([*range(20)], 5, id="good"),
    ]
    counts, found = written(tmp_path, sent, max_length=500)
    assert sorted(one.id for one in found) == ["a loop that was given", "good"] and counts["documents"] == 2
    assert {name: counts[name] for name in counts if name.startswith("dropped:")} == {
        "dropped:too_short": 1, "dropped:looping": 1, "dropped:incomplete": 1
    }  # fmt: skip
    assert written(tmp_path / "cut", [collected([*range(20)], 11, given=True)], max_length=12)[0] == {
        "dropped:too_short": 1
    }


def test_a_frame_that_ends_in_the_middle_leaves_what_was_whole(tmp_path: Path) -> None:
    class Half(Collected):
        def frame(self) -> Any:
            return super().frame()[:-1]

    whole = collected([*range(20)], 5)
    assert [one.id for one in written(tmp_path, [whole, Half(**vars(whole) | {"id": "half"})])[1]] == ["doc"]


def test_a_store_without_aux_states(tmp_path: Path) -> None:
    rows = Rows(torch.zeros(20, 0).bfloat16(), torch.ones(20, HIDDEN).bfloat16())
    sent = replace(collected([*range(20)], 5), parts=[rows])
    (found,) = written(tmp_path, [sent], aux_layers=())[1]
    assert found.aux is None and torch.equal(found.last, rows.last)


def test_many_shards_are_written_by_threads_and_every_one_is_whole(tmp_path: Path) -> None:
    """Memory is used again: a document that was written over before its shard was would have another digest."""
    sent = [collected([number, *range(19 + number % 9)], 5, id=f"doc-{number}") for number in range(120)]
    counts, found = written(tmp_path, sent)
    assert counts["documents"] == 120 and {one.id: one.ids[0].item() for one in found} == {
        f"doc-{number}": number for number in range(120)
    }
    assert len(list(tmp_path.glob("shard-*"))) > 30


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
        keep_document((first, second)[number % 2], make_document(number))
    listed = LocalFolder(tmp_path).names()
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "names", lambda self: listed)  # both find the same number free
        write_kept(first)
        write_kept(second)
    with pytest.raises(DataError, match="is missing; run the same"):
        FeatureStore(tmp_path)
    store = growing(tmp_path, monkeypatch)
    assert store.missing(rows_of(range(12))) == [] and len(store.missing(rows_of(range(15)))) == 3
    assert store.complete() == (12, [])
    assert {entry.id for entry in FeatureStore(tmp_path).entries} == {f"row-{number}" for number in range(12)}
    plans = sorted(path.name for path in tmp_path.glob("plan-*"))
    assert store.complete() == (12, []) and sorted(path.name for path in tmp_path.glob("plan-*")) == plans
    # Other rows may be added by either way.
    keep_document(first, make_document(20))
    write_kept(first)
    assert growing(tmp_path, monkeypatch).complete() == (13, [])
    write_store(tmp_path, range(20, 23))
    assert len(FeatureStore(tmp_path).entries) == 15


def test_lost_and_damaged_shards_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = OpenShards(str(tmp_path), MANIFEST, 2000)
    for number in range(6):
        keep_document(shards, make_document(number))
        if number % 2:
            write_kept(shards)
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
        keep_document(shards, make_document(number))
    write_kept(shards)
    store.look()
    assert store.missing(rows_of(range(6))) == [] and store.complete() == (6, [name])
    assert len(FeatureStore(tmp_path).entries) == 6
    newest = sorted(tmp_path.glob("shard-*"))[-1]
    newest.unlink()
    keep_document(shards, make_document(2))
    write_kept(shards)
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
    keep_document(shards, make_document(1))
    with pytest.raises(DataError, match="has 1,024 MiB left, of which a store leaves 1,024; make room there"):
        write_kept(shards)
    assert not list(tmp_path.glob("shard-*"))
    monkeypatch.undo()
    keep_document(shards, make_document(2))
    assert write_kept(shards) == 1


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
    return collected([number, *range(19)], 5, id=f"doc-{number}")


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

    def full(path: Path, *parts: bytes) -> None:
        raise OSError(DISK_FULL[0], "no space")

    with monkeypatch.context() as patch:
        patch.setattr("eagle_plugin.learning.data.store.objects.create_file", full)
        keep_document(shards, make_document(0))
        with pytest.raises(DataError, match="the disk of .* is full"):
            write_kept(shards)
    keep_document(shards, make_document(1))
    assert write_kept(shards) == 1 and shards.waiting == 0


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
    assert json.loads(found.to_json())["queue_mib"] == default_queue_mib(memory_bytes()) and found.states == "bfloat16"
    assert [default_queue_mib(gib << 30) for gib in (4, 256, 2048)] == [1024, 8192, 16384]
    small = collect_settings(given | {"EAGLE_FEATURES_QUEUE_MIB": "64"})
    assert small is not None and small.queue_bytes == 64 << 20
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
