"""Both engines' servers, really started, store the hidden states of what they answer: those of the reference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bigram_models
import httpx
import pytest
import tiny_models
import torch
from job_worlds import write_recipe
from serving import GRAPHS, VLLM_PYTHON, serving, tiny_spec, vllm_spec
from training_runs import recipe, run_training, write_rows

from eagle_plugin import cli
from eagle_plugin.bench.servers import Server
from eagle_plugin.learning.data import collect, extract, generate
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row, read_rows
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.train.logs import read_log

pytest.importorskip("sglang")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`"),
]
ROOT = Path(__file__).parents[2]
MATRIX = pytest.mark.matrix
MORE_SERVERS = ("sglang graphs", "sglang ranks", "vllm")
# Stock SGLang wants to be told where the ranks of one NUMA node are.
TP_2, TWO_RANKS = ("--tp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
FLAGS = ("--skip-server-warmup", "--enable-metrics")
QUESTIONS = [
    "Hello",
    "What is a tree?",
    "Name three towns",
    "Why?",
    "Count to ten in a language of your choice",
    "Sing",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("collect")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    """One whose head is right in most rounds: paths of several tokens are stored."""
    return bigram_models.bigram_target(folder / "target", noise=0.02)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    rows = [
        {"id": f"p-{i}", "source": "chat", "split": "val" if i == 3 else "train"}
        | {"messages": [{"role": "user", "content": text}], "sampling": {"temperature": 0.0}}
        for i, text in enumerate(QUESTIONS)
    ]
    # Two turns: the second prompt has the first one's tokens, which a prefix cache would have.
    rows[1]["messages"] += [{"role": "assistant", "content": "."}, {"role": "user", "content": "And a wood?"}]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Served(NamedTuple):
    server: Server
    store: Path


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, folder: Path, target: Path) -> Iterator[Served]:
    """The server of one engine, and the store that it writes to."""
    engine = request.param
    head = bigram_models.bigram_eagle3_head(folder / f"head-{engine}", target, wrong=0.3)
    store = folder / f"of-{engine}"
    environment = {"EAGLE_PLUGIN": "1", "EAGLE_POLICY": "random", "EAGLE_FEATURES": str(store)}
    flags = FLAGS
    if engine == "sglang ranks":  # the sharded target of both, whose states rank 0 writes
        environment |= GRAPHS | TWO_RANKS
        flags += TP_2
    elif engine == "sglang graphs":
        environment |= GRAPHS
    if engine == "vllm":
        spec = vllm_spec(target, head, environment=environment | {"PYTHONPATH": str(ROOT)})
    else:
        spec = tiny_spec(target, head, extra_flags=flags, environment=environment)
    with serving([spec], folder / f"logs-{engine}") as (server,):
        yield Served(server, store)


def options(server: Server, prompts: Path, out: Path) -> list[str]:
    return [str(prompts), "--endpoint", server.url, "--out", str(out), "--max-tokens", "24", "--concurrency", "4"]


def run(server: Server, prompts: Path, target: Path, store: Path, out: Path, *more: str) -> int:
    given = ["--target", str(target), "--store", str(store), "--patience", "20", *more]
    return collect.main([*options(server, prompts, out), *given])


def reference(rows: Path, target: Path, store: Path) -> FeatureStore:
    """What transformers give for the same rows, one document per turn: turns in another order are not joined."""
    turns = rows.with_suffix(".turns.jsonl")
    turns.write_text("".join(map(format_row, reversed([*read_rows(rows)]))))
    arguments = [str(turns), "--target", str(target), "--store", str(store), "--dtype", "float32", "--device", "cpu"]
    assert extract.main([*arguments, "--allow-odd-masks"]) == 0
    return FeatureStore(store)


def differences(found: FeatureStore, wanted: FeatureStore, shift: int = 0) -> dict[str, float]:
    """The largest difference of a document's states from the reference's; shift: a fault that is planted."""
    worst = {}
    others = {entry.id: entry for entry in wanted.entries}
    assert found.manifest.differences(wanted.manifest) == []
    assert {entry.id for entry in found.entries} == others.keys()
    for entry in found.entries:
        one, other = found.read(entry), wanted.read(others[entry.id])
        assert torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)
        assert (one.source, one.split) == (other.source, other.split)
        assert one.aux is not None and other.aux is not None
        assert not one.last[-1].any() and not one.aux[-1].any()  # nobody reads the state of an answer's last token
        pairs = ((one.aux, other.aux), (one.last, other.last))
        moved = [(a[:-1].roll(shift, 0).float(), b[:-1].float()) for a, b in pairs]
        worst[entry.id] = max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in moved)
    return worst


@pytest.mark.parametrize(
    "served", ["sglang", *(pytest.param(name, marks=MATRIX) for name in MORE_SERVERS)], indirect=True
)
def test_a_head_learns_from_a_running_server(served: Served, target: Path, tmp_path: Path) -> None:
    """The first test of a server: its store is empty before and after."""
    server, store = served
    rows = write_rows(tmp_path / "rows.jsonl", 24, longest=20, vocab=256)
    values = recipe(target, store) | {"log_every": 1}
    logs = {}
    for name, more in {"online": {"servers": server.url, "store": str(store)}, "alone": None}.items():
        run = run_training(tmp_path, name, values | {"data": {"rows": str(rows), "online": more}})
        logs[name] = read_log(run / "logs" / "train.csv")
    assert [path.name for path in store.iterdir()] == ["manifest.json"]
    for online, alone in zip(logs["online"], logs["alone"], strict=True):
        assert online["tokens"] == alone["tokens"]
        assert online["loss"] == pytest.approx(alone["loss"], rel=2e-3)


@MATRIX
@pytest.mark.parametrize("served", ["sglang", "vllm"], indirect=True)
def test_a_job_needs_no_feature_store(served: Served, target: Path, tmp_path: Path) -> None:
    """Prompts, answers, vocabulary and training, all from the one server; its store is empty before and after."""
    server, store = served
    generate = {"max_tokens": 24, "concurrency": 4, "temperatures": [0.0]}
    path = write_recipe(tmp_path, target, generate=generate, online={"servers": server.url, "store": str(store)})
    assert cli.main(["optimize", str(path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "head" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "features").exists()
    assert [one.name for one in store.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    "served", ["sglang", *(pytest.param(name, marks=MATRIX) for name in MORE_SERVERS)], indirect=True
)
def test_one_pass_stores_what_two_stages_do(served: Served, prompts: Path, target: Path, tmp_path: Path) -> None:
    server, store = served
    assert generate.main(options(server, prompts, tmp_path / "plain.jsonl")) == 0
    assert run(server, prompts, target, store, tmp_path / "rows.jsonl") == 0
    rows = {row.id: row for row in read_rows(tmp_path / "rows.jsonl")}
    assert rows == {row.id: row for row in read_rows(tmp_path / "plain.jsonl")} and len(rows) == len(QUESTIONS) + 1
    found, wanted = FeatureStore(store), reference(tmp_path / "rows.jsonl", target, tmp_path / "reference")
    worst = differences(found, wanted)
    assert max(worst.values()) <= 2**-7, worst  # two neighbours in bfloat16
    assert min(differences(found, wanted, shift=1).values()) > 0.2, "the comparison does not see a shift by one token"
    assert counted(server, "accepted_tokens") > 30, "no paths of several tokens were tried"
    values = recipe(target, store) | {"budget": {"updates": 3}}
    assert (run_training(tmp_path, "head", values) / "head/model.safetensors").is_file()
    # The same command again finds everything done; what is lost is collected again, of the same responses.
    assert run(server, prompts, target, store, tmp_path / "rows.jsonl") == 0
    assert len(FeatureStore(store).entries) == len(rows)
    lost = sorted(store.glob("shard-*"))[0]
    lost.unlink()
    with pytest.raises(DataError, match=f"{lost.name} is missing"):
        FeatureStore(store)
    assert run(server, prompts, target, store, tmp_path / "rows.jsonl", "--patience", "2") == 0
    again = FeatureStore(store)
    assert (
        {entry.id for entry in again.entries} == rows.keys() == {row.id for row in read_rows(tmp_path / "rows.jsonl")}
    )
    assert any(again.read(entry).last[-1].any() for entry in again.entries), "a prefill knows the last state"


@MATRIX
@pytest.mark.parametrize("served", ["sglang", "vllm"], indirect=True)
def test_given_answers_are_one_prefill(served: Served, target: Path, tmp_path: Path) -> None:
    """`data features --endpoint`: the states of all tokens, the last one's too, and no document twice."""
    server, store = served
    before = {entry.id for entry in FeatureStore(store).entries}
    rows = [
        TokenRow(f"given-{i}", "chat", [5 + i, 9, *range(40, 50 + i)], [*range(60, 75), 7, i], "recorded")
        for i in range(4)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(map(format_row, rows)))
    command = [str(path), "--target", str(target), "--store", str(store), "--endpoint", server.url]
    for _ in range(2):
        assert extract.main(command) == 0
    found, wanted = FeatureStore(store), reference(path, target, tmp_path / "reference")
    others = {entry.id: entry for entry in wanted.entries}
    assert len(found.entries) == len(before) + len(rows)
    for entry in found.entries:
        if entry.id in others:
            one, other = found.read(entry), wanted.read(others[entry.id])
            assert torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask) and one.aux is not None
            torch.testing.assert_close(one.last, other.last, atol=2**-7, rtol=2**-7)
            torch.testing.assert_close(one.aux, other.aux, atol=2**-7, rtol=2**-7)


def counted(server: Server, name: str) -> float:
    """One of our counters, `name` with its reason if it has one; 0 where it is not there yet."""
    name, _, reason = name.partition(" ")
    for line in httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith(f"eagle_plugin:{name}_total") and (not reason or f'reason="{reason}"' in line):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@MATRIX
@pytest.mark.parametrize("served", ["sglang", "vllm"], indirect=True)
def test_what_is_stored_and_dropped_is_counted(served: Served) -> None:
    server, store = served
    ask(server, {"features": {"id": "too-short"}}, 3)
    end = time.monotonic() + 60
    entries = FeatureStore(store).entries
    assert len(entries) > 8 and "too-short" not in {entry.id for entry in entries}
    # Beside this one the first requests of the commands above, which say whether a server stores anything. What was
    # lost was counted as well.
    wanted = {"features_dropped too_short": 4, "features_documents": len(entries)}
    wanted["features_tokens"] = sum(entry.length for entry in entries)
    while missing := {name: counted(server, name) for name, least in wanted.items() if counted(server, name) < least}:
        assert time.monotonic() < end, missing
        time.sleep(0.3)


def ask(server: Server, field: dict[str, Any], tokens: int) -> httpx.Response:
    model = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]
    body = {"model": model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0, "eagle_plugin": field}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False)


@MATRIX
@pytest.mark.parametrize("served", ["sglang", "vllm"], indirect=True)
def test_wrong_requests_and_stores_are_refused(served: Served, prompts: Path, target: Path, tmp_path: Path) -> None:
    server, store = served
    answer = ask(server, {"features": {"name": "x"}}, 3)
    assert answer.status_code == 400 and "eagle_plugin.features is" in answer.json()["error"]["message"]
    with pytest.raises(DataError, match="no server writes into .*empty.* start one with EAGLE_FEATURES="):
        run(server, prompts, target, tmp_path / "empty", tmp_path / "rows.jsonl")
    other = tiny_models.tiny_llama(tmp_path / "other", head_dim=32, seed=3)
    with pytest.raises(DataError, match="the features are of target, and .*other is another target"):
        run(server, prompts, other, store, tmp_path / "rows.jsonl")
