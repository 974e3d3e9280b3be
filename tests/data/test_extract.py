"""`eagle-plugin data features`: each row once, with the target's states; resumable; split over processes."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.learning.data import extract
from eagle_plugin.learning.data.extract import main
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row
from eagle_plugin.learning.data.store import extraction
from eagle_plugin.learning.data.store.extraction import form_batches
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.data.store.features import load_target

VOCABULARY = 512


def make_row(number: int, prompt: int | None = None, response: int | None = None) -> TokenRow:
    random = torch.Generator().manual_seed(number)
    sizes = [prompt or 3 + number * 5 % 17, response or 2 + number * 11 % 13]
    ids = [torch.randint(VOCABULARY, (size,), generator=random).tolist() for size in sizes]
    return TokenRow(f"row-{number}", "chat", *ids, finish="stop", split="val" if number % 4 == 0 else "train")


def write_rows(path: Path, rows: list[TokenRow]) -> Path:
    path.write_text("".join(map(format_row, rows)))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", [make_row(number) for number in range(24)])


@pytest.fixture(scope="module")
def whole(rows: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    assert run(rows, tiny_target, store) == 0
    return store


def run(rows: Path, target: Path, store: Path, *more: str) -> int:
    arguments = [str(rows), "--target", str(target), "--store", str(store), "--dtype", "float32", "--device", "cpu"]
    return main([*arguments, "--batch-tokens", "100", *more])


def test_the_store_holds_the_targets_states_of_every_row(whole: Path, tiny_target: Path) -> None:
    store, model = FeatureStore(whole), load_target(tiny_target, torch.float32)
    assert store.manifest.aux_layers == (2, 3, 4)
    store.manifest.check_target(tiny_target)
    assert sorted(entry.id for entry in store.entries) == sorted(f"row-{number}" for number in range(24))
    for entry in store.entries[::3]:
        row, document = make_row(int(entry.id.removeprefix("row-"))), store.read(entry)
        assert document.ids.tolist() == row.prompt_ids + row.response_ids
        assert document.mask.tolist() == [False] * len(row.prompt_ids) + [True] * len(row.response_ids)
        assert (document.split, document.source) == (row.split, row.source)
        with torch.no_grad():
            states = model(document.ids[None], output_hidden_states=True).hidden_states
        for layers, found in (((2, 3, 4), document.aux), ((-1,), document.last)):
            wanted = torch.cat([states[i][0] for i in layers], -1)
            assert found is not None
            torch.testing.assert_close(found.float(), wanted, atol=1e-2, rtol=1e-2)


def test_two_processes_share_the_rows(rows: Path, whole: Path, tiny_target: Path, tmp_path: Path) -> None:
    run(rows, tiny_target, tmp_path, "--rank", "0", "--world", "2")
    with pytest.raises(DataError, match="process 1 of 2 has not begun"):
        FeatureStore(tmp_path)
    run(rows, tiny_target, tmp_path, "--rank", "1", "--world", "2")
    wanted = {entry.id: entry for entry in FeatureStore(whole).entries}
    found = {entry.id: entry for entry in FeatureStore(tmp_path).entries}
    assert found.keys() == wanted.keys()
    for name, entry in found.items():
        a, b = FeatureStore(tmp_path).read(entry), FeatureStore(whole).read(wanted[name])
        assert torch.equal(a.ids, b.ids)
        torch.testing.assert_close(a.last.float(), b.last.float(), atol=1e-2, rtol=1e-2)


def test_a_second_run_does_only_what_is_missing(
    rows: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = write_rows(tmp_path / "some.jsonl", [make_row(number) for number in range(10)])
    run(some, tiny_target, tmp_path / "store")
    capsys.readouterr()
    run(rows, tiny_target, tmp_path / "store")
    shown = capsys.readouterr().out
    assert "14 documents" in shown and "in the store before  10" in shown
    assert len(FeatureStore(tmp_path / "store").entries) == 24
    run(some, tiny_target, tmp_path / "store")  # all rows are there, from other row files
    assert "in the store before  10" in capsys.readouterr().out
    run(rows, tiny_target, tmp_path / "store")
    assert "in the store before  24" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"aux_layers \(2, 3, 4\), not \(1, 2, 6\)"):
        run(rows, tiny_target, tmp_path / "store", "--aux-layers", "1,2,6")


@pytest.mark.parametrize("count", [3, 40])
def test_a_row_file_that_changes_meanwhile_is_found(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    path = write_rows(tmp_path / "r.jsonl", [make_row(number) for number in range(20)])
    monkeypatch.setattr(extract, "MIB", 1 << 12)
    monkeypatch.setattr(
        extract, "_verify", lambda *_, **__: write_rows(path, [make_row(number) for number in range(count)])
    )
    with pytest.raises(DataError, match="the row file changed"):
        run(path, tiny_target, tmp_path / "store")


def test_long_rows_are_cut_and_rows_without_a_response_dropped(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "r.jsonl", [make_row(1, 5, 40), make_row(2, 19, 40), make_row(3, 50, 4)])
    run(path, tiny_target, tmp_path / "store", "--max-length", "20", "--aux-layers", "none")
    assert "2 with fewer than 2 response tokens" in capsys.readouterr().out
    store = FeatureStore(tmp_path / "store")
    (entry,) = store.entries
    document = store.read(entry)
    assert (entry.id, entry.length, entry.n_response, document.aux) == ("row-1", 20, 15, None)


def test_what_cannot_be_done_is_refused_at_start(
    rows: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = write_rows(tmp_path / "twice.jsonl", [make_row(1), make_row(2), make_row(1)])
    beyond = write_rows(tmp_path / "beyond.jsonl", [TokenRow("x", "chat", [1], [VOCABULARY, 2], "stop")])
    empty = write_rows(tmp_path / "empty.jsonl", [])
    store = tmp_path / "store"
    for path, more, match in (
        (twice, (), "two rows with id 'row-1'"),
        (empty, (), "no rows"),
        (beyond, (), "vocabulary ends at 511"),
        (rows, ("--aux-layers", "2,2,5"), "between 0 and 6"),
        (rows, ("--aux-layers", "a,b"), "no list of numbers"),
        (rows, ("--rank", "2", "--world", "2"), "--rank 2"),
    ):
        with pytest.raises(DataError, match=match):
            run(path, tiny_target, store, *more)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError, match="--rank 3"):
        run(rows, tiny_target, store)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 60), max_size=60), st.integers(1, 150))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    rows = [TokenRow(str(k), "", [1], [1] * (n - 1), "stop") for k, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "WINDOW_BATCHES", 3)
        batches = list(form_batches(rows, budget))
    assert Counter(row.id for batch in batches for row in batch) == Counter(row.id for row in rows)
    for batch in batches:
        sizes = [1 + len(row.response_ids) for row in batch]
        assert sizes == sorted(sizes, reverse=True)
        assert len(batch) == 1 or len(batch) * sizes[0] <= budget


def test_the_module_runs_by_itself_as_torchrun_starts_it(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["extract", str(rows), "--target", str(tmp_path), "--store", str(tmp_path / "s")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(extract.__file__, run_name="__main__")
    assert f"error: {tmp_path} has no config.json" in capsys.readouterr().err


def test_every_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for kernels that take "cuda" for their device, as those of MXFP4 experts do."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(extract, "check_device", lambda name: name)
    for name, number in (("RANK", 3), ("WORLD_SIZE", 4), ("LOCAL_RANK", 1)):
        monkeypatch.setenv(name, str(number))
    common = ["rows", "--target", "t", "--store", "s"]
    assert extract._find_place(extract._parse(common)) == (3, 4, "cuda:1")
    assert used == [torch.device("cuda:1")]
    for device in ("cuda", "cpu"):  # the current GPU, and none
        assert extract._find_place(extract._parse([*common, "--device", device])) == (3, 4, device)
    assert len(used) == 1
