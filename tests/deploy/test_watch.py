"""The watch: a drop of acceptance is found, chance and small numbers are not."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from eagle_plugin.cli import main
from eagle_plugin.deploy import watch_command
from eagle_plugin.deploy.drift import Counts, counts_of, judge

TEXT = """\
# TYPE eagle_plugin:verify_rounds counter
eagle_plugin:verify_rounds_total{{model_name="m"}} {rounds}
# TYPE eagle_plugin:accepted_at_depth counter
eagle_plugin:accepted_at_depth_total{{model_name="m",depth="1"}} {first}
eagle_plugin:accepted_at_depth_total{{model_name="m",depth="2"}} {second}
"""


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a server, and what its metrics say."""
    shown = {"text": ""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(shown["text"].encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}", shown
        found.shutdown()


def test_the_counts_become_an_accept_length_and_a_test() -> None:
    counts = counts_of(TEXT.format(rounds=10_000, first=6000, second=3000))
    assert counts == Counts(10_000, (6000, 3000))
    finding = judge(counts, 1.9, 0.05)
    assert finding.accept_length == pytest.approx(1.9) and finding.drifted is False and finding.z < 0
    assert judge(counts, 2.5, 0.05).drifted is True
    # A fall that is no larger than chance allows is none; with more rounds the same fall is one.
    assert judge(Counts(2000, (1200, 600)), 2.05, 0.05).drifted is False
    assert judge(Counts(200_000, (120_000, 60_000)), 2.05, 0.05).drifted is True
    assert judge(Counts(1999, (0, 0)), 3.0, 0.05).drifted is None


def test_a_server_that_was_started_again_counts_from_zero() -> None:
    assert Counts(30, (9, 3)).since(Counts(10, (4,))) == Counts(20, (5, 3))
    assert Counts(5, (1,)).since(Counts(10, (4,))) == Counts(5, (1,))


def test_the_exit_code_tells_what_was_found(server, tmp_path, capsys, monkeypatch) -> None:
    url, shown = server
    rows = [{"state": state, "prompts": "own", "accept_length": {"median": length}} for state, length in
            (("base", 1.1), ("trained", 2.5))]  # fmt: skip
    (tmp_path / "package.json").write_text(json.dumps({"measured": {"benchmark": {"rows": rows}}}))
    arguments = ["watch", url, "--head", str(tmp_path), "--once"]
    shown["text"] = TEXT.format(rounds=10_000, first=9000, second=6500)
    assert main(arguments) == 0 and "no drift" in capsys.readouterr().out
    shown["text"] = TEXT.format(rounds=10_000, first=6000, second=3000)
    assert main(arguments) == 1
    assert "accept length 1.90 over 10,000 rounds, expected 2.50: it has drifted" in capsys.readouterr().out
    shown["text"] = TEXT.format(rounds=10, first=6, second=3)
    assert main(arguments) == 3
    shown["text"] = "up 1\n"
    assert main(arguments) == 2 and "no eagle_plugin:verify_rounds_total" in capsys.readouterr().err
    assert main([*arguments, "--domain", "code"]) == 2

    started = []
    monkeypatch.setattr(watch_command, "_start", lambda recipe: started.append(recipe) or 0)
    (tmp_path / "job.yaml").write_text("")
    shown["text"] = TEXT.format(rounds=10_000, first=6000, second=3000)
    assert main([*arguments, "--start-job", str(tmp_path / "job.yaml")]) == 0 and len(started) == 1


def test_without_a_benchmark_there_is_nothing_to_expect(tmp_path, capsys) -> None:
    assert main(["watch", "http://127.0.0.1:9", "--head", str(tmp_path), "--once"]) == 2
    assert "has no benchmark beside it" in capsys.readouterr().err
    assert main(["watch", "http://127.0.0.1:9", "--expect", "2", "--once"]) == 2
