"""`eagle-plugin deploy` against the server's side of the folder: a head stays, goes back, or is refused."""

from __future__ import annotations

import http.server
import itertools
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from head_edits import tensors
from tiny_models import tiny_eagle3_head, tiny_llama
from trained_heads import rewrite

from eagle_plugin.cli import main
from eagle_plugin.common.deploy_folder import REQUEST, SERVER
from eagle_plugin.common.deploy_folder import Served as ServedFacts
from eagle_plugin.learning.deploy import command
from eagle_plugin.learning.deploy import server as served_head
from eagle_plugin.learning.deploy.server import LOCK
from eagle_plugin.runtime.head_mailbox import HeadMailbox

METRICS = """\
# TYPE eagle_plugin:verify_rounds counter
eagle_plugin:verify_rounds_total {rounds}
# TYPE eagle_plugin:accepted_at_depth counter
eagle_plugin:accepted_at_depth_total{{depth="1"}} {accepted}
"""


class Served:
    """A server whose traffic goes on: 4,000 rounds between two looks at its metrics."""

    def __init__(self, folder: Path, target: Path, head: Path) -> None:
        self.rounds, self.accepted, self.traffic = 0, 0, 4000
        self.share = {str(head): 0.6}  # of the rounds of a head, those that accept a draft
        self.head, self.looks, self.busy = head, True, False
        serves = ServedFacts("sglang", str(target), str(head), "EAGLE3")
        clock = itertools.count().__next__  # a second passes between two looks, whatever the machine does
        self.mailbox = HeadMailbox(folder, serves, self.take, logging.getLogger("served"), clock)

    def take(self, head: Path) -> None:
        if not head.is_dir():
            raise FileNotFoundError(f"{head} is gone")
        self.head = head

    def metrics(self) -> str:
        self.rounds += self.traffic
        self.accepted += int(self.traffic * self.share.get(str(self.head), 0.0))
        return METRICS.format(rounds=self.rounds, accepted=self.accepted)


class Case:
    """A server with its folder, and a new head of the same form as the served one."""

    def __init__(self, folder: Path) -> None:
        self.target = tiny_llama(folder / "target")
        self.old = tiny_eagle3_head(folder / "old", self.target)
        self.new = Path(shutil.copytree(self.old, folder / "new"))
        self.folder = folder / "deploy"
        self.folder.mkdir(mode=0o700)
        self.served = Served(self.folder, self.target, self.old)
        self.url = ""
        self.key = ""  # without which the server answers nothing but its metrics

    def deploy(self, *options: str, head: Path | None = None) -> int:
        return main(["deploy", str(head or self.new), "--server", self.url, "--folder", str(self.folder), *options])


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    made = Case(tmp_path)
    monkeypatch.setattr(command, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(served_head, "WAKE_EVERY", 0.06)

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def refuses(self) -> bool:
            refused = bool(made.key) and self.headers.get("Authorization") != f"Bearer {made.key}"
            if refused:
                self.send_error(401)
            return refused

        def do_GET(self) -> None:
            if self.path != "/metrics" and self.refuses():
                return
            self.answer(made.served.metrics() if self.path == "/metrics" else json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["model"] == "m"
            if self.refuses():
                return
            if made.served.looks:
                made.served.mailbox.look()
            if made.served.busy:
                self.send_error(503)
                return
            self.answer("{}")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield made
        server.shutdown()


def test_a_better_head_stays(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.served.share[str(case.new)] = 0.8
    assert case.deploy("--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert case.served.head == case.new and result["serves"] == "new"
    assert (result["accept_length_before"], result["accept_length_after"]) == (1.6, 1.8)


def test_a_worse_head_goes_back(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.served.share[str(case.new)] = 0.4
    assert case.deploy() == 1
    assert case.served.head == case.old and "worse, so the old head" in capsys.readouterr().out
    assert json.loads((case.folder / SERVER).read_text())["head"] == str(case.old)
    assert case.deploy("--no-watch") == 0 and case.served.head == case.new


@pytest.mark.parametrize("share", [0.8, 0.4])
def test_a_server_that_refuses_requests_and_exchanges_the_head(
    share: float, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head serves, so it is watched, and goes back in the same way."""
    case.served.busy = True
    case.served.share[str(case.new)] = share
    better = share > 0.6
    assert case.deploy() == (0 if better else 1)
    assert case.served.head == (case.new if better else case.old)
    write = case.served.mailbox._write
    case.served.mailbox._write = lambda name, content: write(name, content) if name == SERVER else None
    other = case.old if better else case.new
    assert case.deploy("--no-watch", head=other) == 0 and case.served.head == other
    case.served.looks = False
    assert case.deploy("--no-watch", head=case.old if other == case.new else case.new) == 2
    assert case.served.head == other and "does not answer (" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"pid": -1}, {"pid": -1, "head": "of-its-flags"}, {"head": "of-another-command"}])
def test_a_server_that_is_started_again_during_the_watch(
    change: dict[str, Any], case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = case.served.metrics

    def restarted() -> str:
        if case.served.head == case.new and case.served.rounds > 8000:
            case.served.mailbox._server |= change
            case.served.mailbox._tell()
        return metrics()

    case.served.metrics = restarted
    case.served.share[str(case.new)] = 0.9
    assert case.deploy() == 2
    shown = capsys.readouterr().err
    assert "was started again" in shown and f"{change.get('head', case.new)} serves" in shown


def test_a_server_with_a_key(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("EAGLE_API_KEY", raising=False)
    case.key = "sk-tr4nquil"
    assert case.deploy("--no-watch") == 2 and case.served.head == case.old
    assert "set EAGLE_API_KEY to a key of this server" in capsys.readouterr().err
    monkeypatch.setenv("EAGLE_API_KEY", case.key)
    assert case.deploy("--no-watch") == 0 and case.served.head == case.new


def test_a_head_that_was_never_trained_is_named(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else looks at it where the exchange is not watched."""
    assert case.deploy("--no-watch") == 0 and "warning" not in capsys.readouterr().err
    tensors(lambda t: [tensor.zero_() for tensor in t.values()])(case.new)
    for engine in ("sglang", "vllm"):
        facts = json.loads((case.folder / SERVER).read_text()) | {"engine": engine}
        (case.folder / SERVER).write_text(json.dumps(facts))
        assert case.deploy("--no-watch") == 0 and case.served.head == case.new
        printed = capsys.readouterr().err
        assert "warning: " in printed and "with zeros alone, so that hardly a draft will be right" in printed


def test_a_head_is_compared_with_the_one_before_it_alone(case: Case, tmp_path: Path) -> None:
    """The counters of a server go on through an exchange, and the first head had most of the rounds."""
    case.served.rounds, case.served.accepted = 100_000, 60_000
    third = Path(shutil.copytree(case.old, tmp_path / "third"))
    case.served.share |= {str(case.new): 1.0, str(third): 0.8}
    assert case.deploy() == 0 and case.served.head == case.new
    assert case.deploy(head=third) == 1 and case.served.head == case.new
    case.served.mailbox._server["pid"] = -1  # another server, which began with this head
    case.served.mailbox._tell()
    case.served.rounds, case.served.accepted = 10_000, 6_000
    assert case.deploy(head=third) == 0 and case.served.head == third


def test_the_old_head_may_be_gone(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    take = case.served.take

    def lose_the_old_one(head: Path) -> None:
        take(head)
        shutil.rmtree(case.old)

    case.served.mailbox._exchange = lose_the_old_one
    assert case.deploy() == 2
    assert "still serves, since the old head did not load" in capsys.readouterr().err
    assert case.served.head == case.new


def test_without_traffic_nothing_is_compared(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.served.traffic = 99
    assert case.deploy() == 2
    assert "has verified 99 rounds with its head" in capsys.readouterr().err and case.served.head == case.old
    case.served.rounds, case.served.traffic = 5000, 0
    assert case.deploy("--minutes", "0.001", "--json") == 0
    found = capsys.readouterr()
    assert "so it was not compared" in found.err and "accept_length_after" not in json.loads(found.out)


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", 0.5), ("intermediate_size", 999)])
def test_a_head_of_another_form_is_refused(
    key: str, value: float, case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = rewrite(case.old, tmp_path / "other", config=lambda config: config | {key: value})
    assert case.deploy(head=other) == 2
    assert capsys.readouterr().err.count("\n") == 1 and case.served.head == case.old


def test_what_is_wrong_is_one_sentence(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sentence: str, *options: str) -> None:
        assert case.deploy(*options) == 2
        shown = capsys.readouterr().err
        assert sentence in shown and shown.count("\n") == 1
        assert case.served.head == case.old and not (case.folder / REQUEST).exists()

    case.served.looks = False
    refused("does not look into", "--no-watch")
    case.served.looks = True
    with FileLock(case.folder / LOCK):
        refused("another `eagle-plugin deploy` uses")
    right, case.url = case.url, "http://127.0.0.1:9"
    refused("does not answer", "--no-watch")
    refused("does not answer with metrics")
    case.url = right
    monkeypatch.setattr(case.served, "metrics", lambda: "up 1\n")
    refused("no eagle_plugin:verify_rounds_total")
    case.served.mailbox._server["refuses"] = "several ranks serve it together"
    case.served.mailbox._tell()
    refused("several ranks serve it together")
    for text in ("{}", "[]", "["):
        (case.folder / SERVER).write_text(text)
        refused(SERVER)


def test_the_folder_must_be_named(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", str(case.new), "--server", case.url]) == 2
    assert "the folder of the server is not given" in capsys.readouterr().err
    for options in (["--rounds", "5"], ["--minutes", "0"], ["--minutes", "inf"]):
        with pytest.raises(SystemExit, match="2"):
            case.deploy(*options)
