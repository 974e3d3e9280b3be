"""`data collect` against servers that do not store, and a store that does not get what it was to get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_documents import MANIFEST
from token_endpoint import TokenEndpoint

from eagle_plugin.learning.data import collect
from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.generation import endpoints
from eagle_plugin.learning.data.provenance import Terms, read_sources, write_sources
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import open_folder
from eagle_plugin.learning.data.store.sources import stored_sources


@pytest.fixture
def command(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    OpenShards(str(tmp_path / "store"), MANIFEST, 2000)
    monkeypatch.setattr(Manifest, "check_target", lambda *_: None)
    rows = [{"id": f"p-{i}", "source": "chat", "split": "train", "prompt": f"text {i}"} for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"--target": tiny_target, "--store": tmp_path / "store", "--out": tmp_path / "rows.jsonl"}
    given = [word for name, value in options.items() for word in (name, str(value))]
    return [str(tmp_path / "prompts.jsonl"), *given, "--patience", "0.2", "--temperature", "0"]


def test_a_server_without_the_plugin_is_refused(command: list[str], tmp_path: Path) -> None:
    with TokenEndpoint("vllm") as server, pytest.raises(DataError) as refused:
        collect.main([*command, "--endpoint", server.url])
    assert "it does not store hidden states: wanted a server with eagle-plugin, started with" in str(refused.value)
    assert not list(read_rows(tmp_path / "rows.jsonl"))


def test_documents_that_do_not_come_are_asked_for_again_and_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of servers whose queue or disk is full: what was answered is kept, and the exit code is 1."""
    monkeypatch.setattr(endpoints, "stores_states", lambda response: True)
    sources = {"chat": Terms("mit", trains_models=False, answers_only=True)}
    write_sources(tmp_path / "prompts.jsonl", sources)
    with TokenEndpoint("vllm") as server:
        assert collect.main([*command, "--endpoint", server.url]) == 1
        asked = [
            request for request in server.requests if "given" in request.get("eagle_plugin", {}).get("features", {})
        ]
    # The answers are the target's own.
    told = {"chat": Terms("mit")}
    assert read_sources(tmp_path / "rows.jsonl") == told == stored_sources(open_folder(tmp_path / "store"))
    rows = {row.id: row for row in read_rows(tmp_path / "rows.jsonl")}
    assert len(rows) == 3 and "3 documents did not reach" in " ".join(capsys.readouterr().err.split())
    found = {request["eagle_plugin"]["features"]["id"]: request for request in asked}
    assert found.keys() == rows.keys()
    for name, request in found.items():
        assert request["prompt"] == rows[name].prompt_ids + rows[name].response_ids and request["max_tokens"] == 1
        assert request["eagle_plugin"]["features"]["given"] == len(rows[name].prompt_ids)
