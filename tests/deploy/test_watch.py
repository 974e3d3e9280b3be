"""The watch: a drop of acceptance is found, chance and small numbers are not."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_plugin.cli import main
from eagle_plugin.learning.data.traffic.segments import NewAnswers, segments_of
from eagle_plugin.learning.deploy import watch_command
from eagle_plugin.learning.deploy.counts import Counts, counts_of
from eagle_plugin.learning.deploy.domains import DomainWatch, rounds_by_domain
from eagle_plugin.learning.deploy.drift import judge

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


def test_rounds_without_drafts_count_as_in_the_benchmark() -> None:
    """A policy on a busy server verified 2,000 trees, and 8,000 rounds were plain."""
    drafted = TEXT.format(rounds=2000, first=1200, second=600)
    shapes = "# TYPE eagle_plugin:shape_rounds counter\n" + "".join(
        f'eagle_plugin:shape_rounds_total{{model_name="m",shape="{shape}"}} {rounds}\n'
        for shape, rounds in (("0/1/1", 8000), ("2/4/8", 1500), ("1/1/2", 500))
    )
    counts = counts_of(drafted + shapes, plain=True)
    tokens, rounds = 10_000 + 1800, 10_000  # each round yields a token of the target's own
    assert counts.rounds == rounds and counts.accept_length == pytest.approx(tokens / rounds)
    assert counts_of(drafted + shapes) == Counts(2000, (1200, 600))  # of drafts alone, to compare two heads
    assert counts_of(drafted, plain=True) == Counts(2000, (1200, 600))  # without a policy no round is plain


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
    plain = 'eagle_plugin:shape_rounds_total{model_name="m",shape="0/1/1"} 20000\n'
    drafted = TEXT.format(rounds=10_000, first=9000, second=6500)
    shown["text"] = f"{drafted}# TYPE eagle_plugin:shape_rounds counter\n{plain}"
    assert main(arguments) == 1 and "accept length 1.77 over 20,000 rounds" in capsys.readouterr().out
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


def record(drafts: object, time: float = 100.0, **more: object) -> dict[str, object]:
    return {"v": 1, "time": time, "request": {}, "response": {"text": "A", "accepted_drafts": drafts}, **more}


def write_capture(folder: Path, *records: dict[str, object], number: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / f"capture-20261123T000000-h-1-{number:06}.jsonl").write_text(lines)


def test_domains_are_counted_from_the_records(tmp_path) -> None:
    """A record that counts nothing, or has no counts, is in no domain; one without a domain has that without a name."""
    folder = tmp_path / "capture"
    write_capture(
        folder,
        record([3, 0, 2], domain="code"),
        record([1, 4], domain="code", time=99.0),
        record([0, 1]),
        *(record(drafts, domain="other") for drafts in ([], [0, 0], None, "many", [-1, 2])),
        {"v": 1, "time": 1.0, "request": {}, "response": {"text": "A"}},
    )
    rounds = rounds_by_domain(NewAnswers(folder).take())
    assert rounds == {"code": {0: 4, 1: 4, 2: 2}, "": {0: 0, 1: 1}}
    assert Counts.of_rounds(rounds["code"]) == Counts(10, (6.0, 2.0))
    assert rounds_by_domain(NewAnswers(folder).take(), since=100.0)["code"] == {0: 3, 1: 0, 2: 2}


def test_a_drift_in_one_domain_is_found_though_the_whole_has_none(server, tmp_path, capsys) -> None:
    url, shown = server
    folder = tmp_path / "capture"
    rows = [{"state": "trained", "prompts": name, "accept_length": {"median": length}} for name, length in
            (("chat", 1.8), ("code", 3.0))]  # fmt: skip
    (tmp_path / "package.json").write_text(json.dumps({"measured": {"benchmark": {"rows": rows}}}))
    shown["text"] = TEXT.format(rounds=10_000, first=9000, second=6500)  # 2.55; expected is 2.4
    arguments = ["watch", url, "--head", str(tmp_path), "--once", "--captures", str(folder)]
    good, bad = [20, 60, 20], [60, 30, 10]  # accept lengths 2.0 and 1.5
    write_capture(folder, *[record(good, domain="chat")] * 100, *[record(good)] * 100, record(bad, domain="new"))
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "chat: accept length 2.00 over 10,000 rounds, expected 1.80: no drift",
        "new: accept length 1.50 over 100 rounds, not measured",
        "(no domain): accept length 2.00 over 10,000 rounds, not measured",
        "accept length 2.55 over 10,000 rounds, expected 2.40: no drift",
    ]
    write_capture(folder, *[record(bad, domain="code")] * 100, number=2)
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "code: accept length 1.50 over 10,000 rounds, expected 3.00: it has drifted\n" in out
    assert "expected 2.40; by domain, code: it has drifted" in out
    assert main([*arguments, "--hours", "1"]) == 0  # the records are from 1970
    assert "no record has counts of rounds" in capsys.readouterr().out
    assert main([*arguments[:-1], str(tmp_path / "none")]) == 2
    assert "none is not a folder" in capsys.readouterr().err


def test_few_rounds_of_a_domain_are_joined_with_later_ones(tmp_path) -> None:
    folder = tmp_path / "capture"
    write_capture(folder, *[record([50, 50], time=10.0, domain="a")] * 15)
    watch = DomainWatch(NewAnswers(folder), {"a": 1.5}, None, 0.05, since=5.0)
    (first,) = watch.judge()
    assert first.finding.drifted is None and "over 1,500 rounds, expected 1.50: too few rounds" in str(first)
    write_capture(folder, *[record([50, 50], time=30.0, domain="a")] * 15, number=2)
    (second,) = watch.judge()
    assert second.finding.rounds == 3000 and second.drifted is False
    assert watch.judge() == []


def test_each_answer_is_counted_once_when_it_is_recorded(tmp_path) -> None:
    """Also one that was asked for in an interval and ended in the next, and one whose line is not whole yet."""
    folder = tmp_path / "capture"
    write_capture(folder, record([9, 9], domain="a"))
    answers = NewAnswers(folder)
    answers.skip()
    (path,) = segments_of(folder)
    late = (json.dumps(record([1, 2], time=1.0, domain="a")) + "\n").encode()
    with path.open("ab") as file:
        file.write(late + late[:20])
    assert rounds_by_domain(answers.take()) == {"a": {0: 1, 1: 2}}
    with path.open("ab") as file:
        file.write(late[20:])
    write_capture(folder, record([5], domain="b"), number=2)
    assert rounds_by_domain(answers.take()) == {"a": {0: 1, 1: 2}, "b": {0: 5}}
    assert rounds_by_domain(answers.take()) == {}
    path.unlink()
    assert rounds_by_domain(answers.take()) == {}


def test_a_watch_outlives_a_server_that_is_started_again(server, capsys, monkeypatch) -> None:
    url, shown = server
    drifted = TEXT.format(rounds=20_000, first=2000, second=100)
    shown["text"] = TEXT.format(rounds=10_000, first=1000, second=50)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        shown["text"] = drifted if len(looks) == 10 else "up 1\n"

    monkeypatch.setattr(watch_command.time, "sleep", sleep)
    arguments = ["watch", url, "--expect", "2", "--every", "1"]
    assert main(arguments) == 1 and len(looks) == 10
    assert "9 of at most 10 times in a row" in capsys.readouterr().out
    looks.clear()
    drifted, shown["text"] = "up 1\n", TEXT.format(rounds=10_000, first=1000, second=50)
    assert main(arguments) == 2 and len(looks) == 10


def test_hours_are_for_captures_that_are_judged_once() -> None:
    with pytest.raises(SystemExit):
        main(["watch", "http://127.0.0.1:9", "--expect", "2", "--once", "--hours", "1"])
