"""Training on states that servers compute: the same head as from a store, and what becomes of it when they fail."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from feature_endpoint import FeatureEndpoint, shifted
from kept_documents import keep_document, write_kept
from token_endpoint import TokenEndpoint
from training_runs import distance, launch_ranks, newest, recipe, run_training, weights, write_recipe

from eagle_plugin import cli
from eagle_plugin.learning.data.collecting import servers
from eagle_plugin.learning.data.collecting.completion import GrowingStore
from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.collecting.spool import Spool
from eagle_plugin.learning.data.generation import endpoints
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import Document, FeatureStore
from eagle_plugin.learning.train import command, online
from eagle_plugin.learning.train.recipe import TrainError, parse_recipe

UPDATES = 8


def served(features: Any, spool: Path, *urls: str, **keys: Any) -> dict[str, Any]:
    """A recipe over the rows of the store, computed by servers."""
    values = recipe(features.target, features.store, budget={"updates": UPDATES}, **keys)
    return values | {"data": {"rows": str(features.rows), "online": {"servers": list(urls), "store": str(spool)}}}


def left_in(spool: Path) -> list[str]:
    return sorted(path.name for path in spool.iterdir() if path.name != "manifest.json")


@pytest.fixture(scope="module")
def stored(features, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run from the store."""
    values = recipe(features.target, features.store, budget={"updates": UPDATES})
    return run_training(tmp_path_factory.mktemp("stored"), "stored", values)


def test_the_head_is_that_of_a_run_from_a_store(features, stored: Path, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with FeatureEndpoint(features.store, spool) as first, FeatureEndpoint(features.store, spool) as second:
        run = run_training(tmp_path, "online", served(features, spool, first.url, second.url))
        assert first.asked > 3 and second.asked > 3
        held_out = sum(entry.split == "val" for entry in FeatureStore(features.store).entries)
        trained = [body for one in (first, second) for body in one.requests if "given" in str(body)]
        assert sum('"val"' in str(body).replace("'", '"') for body in trained) <= held_out, "kept after they were read"
    assert weights(run) == weights(stored)
    assert left_in(spool) == []
    with FeatureEndpoint(features.store, tmp_path / "other", shifted) as wrong:
        control = run_training(tmp_path, "control", served(features, tmp_path / "other", wrong.url))
    assert weights(control) != weights(stored), "the states are not looked at"


def test_a_run_continues_with_another_server(features, stored: Path, tmp_path: Path) -> None:
    """The first one is killed, with documents on their way; the second has another URL and another store."""
    values = served(features, tmp_path / "first", "http://127.0.0.1:1")
    with FeatureEndpoint(features.store, tmp_path / "first") as server, pytest.MonkeyPatch.context() as patch:
        values["data"]["online"]["servers"] = [server.url]

        def stop_halfway(self, *arguments, save=command.Trainer._save):
            save(self, *arguments)
            raise KeyboardInterrupt

        patch.setattr(command.Trainer, "_save", stop_halfway)
        with pytest.raises(KeyboardInterrupt):
            command.main([str(write_recipe(tmp_path / "run.yaml", values)), "--out", str(tmp_path / "run")])
    shutil.copytree(tmp_path / "first", tmp_path / "second")  # with what was left there
    with FeatureEndpoint(features.store, tmp_path / "second") as server:
        values["data"]["online"] = {"servers": server.url, "store": str(tmp_path / "second"), "ahead": 1}
        run = run_training(tmp_path, "run", values)
    assert weights(run) == weights(stored)
    assert left_in(tmp_path / "second") == []


def test_documents_that_do_not_come_are_asked_for_again(
    features, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "PATIENCE_S", 0.5)
    spool, dropped = tmp_path / "spool", set[str]()

    def drop_once(document: Document, before: int) -> Document | None:
        if before % 3 or document.id in dropped:
            return document
        dropped.add(document.id)
        return None

    with FeatureEndpoint(features.store, spool, drop_once) as server:
        assert weights(run_training(tmp_path, "run", served(features, spool, server.url))) == weights(stored)
    assert len(dropped) > 5
    with (
        FeatureEndpoint(features.store, tmp_path / "none", lambda one, before: None) as server,
        pytest.raises(DataError, match="were answered by servers and did not reach .*none; is it their EAGLE_FEATURES"),
    ):
        run_training(tmp_path, "none", served(features, tmp_path / "none", server.url))


def test_nothing_is_dropped_where_a_server_says_how_much_its_queue_holds(
    features, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a queue that holds about two updates of eight, without which documents are dropped and computed again."""
    queue = 2 * 200 * 2 * 64 * 4
    with FeatureEndpoint(features.store, tmp_path / "spool", queue=queue) as server:
        run = run_training(tmp_path, "run", served(features, tmp_path / "spool", server.url))
        assert server.dropped == 0
    assert weights(run) == weights(stored) and left_in(tmp_path / "spool") == []
    monkeypatch.setattr(online, "PATIENCE_S", 3.0)
    monkeypatch.setattr(online, "TRIES", 20)
    with FeatureEndpoint(features.store, tmp_path / "silent", queue=queue, told=False) as silent:
        control = run_training(tmp_path, "control", served(features, tmp_path / "silent", silent.url))
        assert silent.dropped > 0 and silent.asked > server.asked
    assert weights(control) == weights(stored)


@pytest.mark.slow
def test_two_processes_read_from_one_store(features, stored: Path, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with FeatureEndpoint(features.store, spool) as server:
        values = served(features, spool, server.url)
        file = write_recipe(tmp_path / "ranks.yaml", values)
        launch_ranks([file])
        owners = {
            body["eagle_plugin"]["features"]["id"].split("-")[2] for body in server.requests[1:] if "given" in str(body)
        }
    assert owners == {"000", "001"}
    assert distance(newest(file.with_suffix("")), newest(stored)) < 2e-5
    assert left_in(spool) == []


def test_a_server_that_fails_is_left_to_itself(features, stored: Path, tmp_path: Path) -> None:
    """The requests that it fails at go to the other one at once."""
    spool, on = tmp_path / "spool", {"x-eagle-features": "on"}
    fails = TokenEndpoint(headers=on, behaviour=lambda path, body: (500, {}) if "given" in str(body) else None)
    with FeatureEndpoint(features.store, spool) as server, fails:
        run = run_training(tmp_path, "run", served(features, spool, fails.url, server.url))
    assert weights(run) == weights(stored)
    assert sum("given" in str(body) for body in fails.requests) > 1


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_server_that_comes_back_is_used_again(
    features, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "REOPEN_S", 0.1)
    monkeypatch.setattr(endpoints, "RETRIES", 1)
    spool, port, ended = tmp_path / "spool", free_port(), threading.Event()

    def end_after_ten(document: Any, before: int) -> Any:
        if before == 10:
            ended.set()
        return document

    first = FeatureEndpoint(features.store, spool, end_after_ten, port=port)

    def restart() -> None:
        ended.wait(60)
        first.__exit__()
        time.sleep(0.5)
        with FeatureEndpoint(features.store, spool, port=port):
            finished.wait(60)

    finished = threading.Event()
    first.__enter__()
    other = threading.Thread(target=restart)
    other.start()
    try:
        run = run_training(tmp_path, "run", served(features, spool, first.url))
    finally:
        ended.set()
        finished.set()
        other.join()
    assert weights(run) == weights(stored)
    told = capsys.readouterr().err
    assert f"waiting for {first.url}" in told and f"{first.url} answers again" in told


def test_servers_that_stay_away_end_the_run_in_one_sentence(
    features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "REOPEN_S", 0.1)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.4)
    monkeypatch.setattr(endpoints, "RETRIES", 1)
    spool = tmp_path / "spool"
    server = FeatureEndpoint(features.store, spool, lambda one, before: ended.set() if before == 30 else one)
    ended = threading.Event()
    server.__enter__()
    other = threading.Thread(target=lambda: (ended.wait(60), server.__exit__()))
    other.start()
    file = write_recipe(tmp_path / "run.yaml", served(features, spool, server.url, checkpoint_every=1))
    assert cli.main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    other.join()
    error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(error) == 1 and "no server of data.online has answered for 0.4 s" in error[0]
    assert "it continues from the last checkpoint" in error[0]


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_run_whose_servers_are_gone(features, tmp_path: Path) -> None:
    """It does not wait the ten minutes for which it would wait for a server."""
    spool, began = tmp_path / "spool", threading.Event()
    with FeatureEndpoint(features.store, spool, lambda one, before: began.set() or one) as server:
        values = served(features, spool, server.url) | {"budget": {"updates": 100_000}}
        file = write_recipe(tmp_path / "run.yaml", values)
        command_line = [sys.executable, "-m", command.__name__, str(file), "--out", str(tmp_path / "run")]
        run = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True)
        assert began.wait(60)
    assert run.stderr is not None
    for line in run.stderr:
        if "waiting for" in line:
            break
    # Until it ends: two signals that come before the process runs again are one.
    for _ in range(60):
        if run.poll() is not None:
            break
        run.send_signal(signal.SIGINT)
        time.sleep(1)
    assert run.wait(60) in (130, -signal.SIGINT)


def test_a_store_that_another_run_clears_meanwhile(features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards can go between their header and their documents, which are then asked for again."""
    url, store = str(tmp_path / "spool"), FeatureStore(features.store)
    shards, spool = OpenShards(url, store.manifest, 1 << 20), Spool(url, store.manifest, 1, 0)
    keep_document(shards, replace(store.read(store.entries[0]), id=spool.name(0)))
    write_kept(shards)

    def gone(name: str, start: int = 0, stop: int | None = None, read: Any = spool._folder.read) -> Any:
        if start:
            Spool(url, store.manifest, 2, 0).clear()
        return read(name, start, stop)

    monkeypatch.setattr(spool._folder, "read", gone)
    assert spool.take() == {} and left_in(tmp_path / "spool") == []


@pytest.mark.slow
def test_a_signal_while_servers_are_away_saves_the_run(features, tmp_path: Path) -> None:
    """One signal is enough: the update that waits is given up, and those before it are in a checkpoint."""
    spool, began = tmp_path / "spool", threading.Event()
    with FeatureEndpoint(features.store, spool, lambda one, before: one if before < 60 else began.set()) as server:
        values = served(features, spool, server.url, checkpoint_every=100_000) | {"budget": {"updates": 100_000}}
        file = write_recipe(tmp_path / "run.yaml", values)
        command_line = [sys.executable, "-m", command.__name__, str(file), "--out", str(tmp_path / "run")]
        run = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True)
        assert began.wait(60)
    assert run.stderr is not None and any("waiting for" in line for line in run.stderr)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 130
    assert newest(tmp_path / "run").is_file()


def test_two_runs_share_a_store(features, tmp_path: Path) -> None:
    """Neither removes what the other has asked for, also where one shard has documents of both."""
    manifest = FeatureStore(features.store).manifest
    url, store = str(tmp_path / "spool"), FeatureStore(features.store)
    shards = OpenShards(url, manifest, 1 << 20)
    first, second = (Spool(url, manifest, run, 0) for run in (1, 2))
    for spool in (first, second):
        keep_document(shards, replace(store.read(store.entries[0]), id=spool.name(7)))
    write_kept(shards)
    assert list(first.take()) == [first.name(7)] and not first.take()
    assert list(second.take()) == [second.name(7)]
    assert left_in(tmp_path / "spool") == []


def refused(features: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], spool: Path, *urls: str) -> str:
    file = write_recipe(tmp_path / "refused.yaml", served(features, spool, *urls))
    assert cli.main(["train", str(file), "--out", str(tmp_path / "refused")]) == 2
    assert not (tmp_path / "refused" / "checkpoints").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def test_stores_and_servers_of_another_kind_are_refused(
    features, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "RETRIES", 1)
    spool = tmp_path / "spool"
    assert f"no server writes into {spool}" in refused(features, tmp_path, capsys, spool, "http://127.0.0.1:1")
    store = FeatureStore(features.store)
    shards = OpenShards(str(spool), store.manifest, 1 << 20)
    sentence = refused(features, tmp_path, capsys, spool, "http://127.0.0.1:1")
    assert "no server of data.online answers (http://127.0.0.1:1: " in sentence
    with TokenEndpoint() as server:
        assert "it does not store hidden states" in refused(features, tmp_path, capsys, spool, server.url)
    with TokenEndpoint(headers={"x-eagle-features": "on"}, behaviour=lambda path, body: refuse(body)) as server:
        sentence = refused(features, tmp_path, capsys, spool, server.url)
        assert "refuses a row of" in sentence and "EAGLE_FEATURES_MAX_LENGTH" in sentence
    keep_document(shards, store.read(store.entries[0]))
    write_kept(shards)
    sentence = refused(features, tmp_path, capsys, spool, "http://127.0.0.1:1")
    assert "which no training run has asked for: online training removes what it has read" in sentence
    growing = GrowingStore(spool, features.target)
    growing.complete()
    kept = left_in(spool)
    assert "is a feature store with a plan" in refused(features, tmp_path, capsys, spool, "http://127.0.0.1:1")
    assert left_in(spool) == kept and len(kept) == 2


def refuse(body: dict[str, Any]) -> Any:
    return (400, {"error": {"message": "too long"}}) if "given" in str(body) else None


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"store": "/s", "online": {"servers": "u", "store": "/s"}}, "online is for rows"),
        ({"rows": "r", "online": {"servers": [], "store": "/s"}}, "data.online.servers"),
        ({"rows": "r", "online": {"servers": "u"}}, "data.online.store"),
        ({"rows": "r", "online": {"servers": "u", "store": "s"}}, "wanted a URL or a folder from the root on"),
        ({"rows": "r", "online": {"servers": "u", "store": "/s"}, "max_length": 9}, "when the servers were started"),
        ({"rows": "r", "online": {"servers": "u", "store": "/s", "ahead": 0}}, "data.online.ahead"),
    ],
)
def test_faults_of_the_recipe(data: dict[str, Any], wanted: str) -> None:
    with pytest.raises(TrainError, match=wanted):
        parse_recipe({"target": "t", "budget": {"epochs": 1}, "data": data}, "recipe.yaml")
