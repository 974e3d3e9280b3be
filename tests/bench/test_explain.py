"""`eagle-plugin explain`: the same report from a recorded log line and from a metrics endpoint, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from PIL import Image
from prometheus_client import CollectorRegistry, generate_latest

from eagle_plugin import cli
from eagle_plugin.bench.explain import summary
from eagle_plugin.bench.policy_picture import lines_by_depth
from eagle_plugin.bench.policy_sources import SourceError, counted_errors, read_report, report_of_lines
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.log import without_policy
from eagle_plugin.policy.metrics import families
from eagle_plugin.policy.report import Expected, PolicyReport, ShapeTotals
from eagle_plugin.runtime.startup import plugin_serves

# As a server wrote it.
LINE = (
    "[2026-01-01 10:00:00] eagle-plugin: policy, 60 s, 14 rounds: 2/4/8 71%, plain 29%; accept length 2.50; now 2/4/8 "
    "for 2 requests, expected 1.20x of plain decoding, next best 1/1/2 with 1.07x; policy-report "
    '{"version":1,"mode":"auto","caps":"2/4/8","present":"2/4/8","requests":2,"prefix_tokens":700,"slowdown":1.25,'
    '"factors":[1.5,0.5],"totals":{"0/1/1":[4,4,2,1,0.02,0.025],"2/4/8":[10,25,5,4,0.2,0.1]},'
    '"expected":{"0/1/1":[0.02,1],"1/1/2":[0.03,1.6],"2/4/8":[0.05,3]}}\n'
)
CAPS, SMALL = Shape(2, 4, 8), Shape(1, 1, 2)
REPORT = PolicyReport(
    "auto",
    CAPS,
    CAPS,
    requests=2,
    prefix_tokens=700,
    slowdown=1.25,
    factors=(1.5, 0.5),
    totals={PLAIN: ShapeTotals(4, 4, 2, 1, 0.02, 0.025), CAPS: ShapeTotals(10, 25, 5, 4, 0.2, 0.1)},
    expected={PLAIN: Expected(0.02, 1.0), SMALL: Expected(0.03, 1.6), CAPS: Expected(0.05, 3.0)},
)


def metrics_of(*reports: PolicyReport) -> str:
    """What a server exports; of several reports, each with a rank of its own."""

    class Collector:
        def collect(self) -> Iterable[object]:
            return families([(report, {"model_name": "m", "tp_rank": str(n)}) for n, report in enumerate(reports)])

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a server, and the texts of its pages; other pages are not there."""
    pages: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = pages.get(self.path)
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", pages
        running.shutdown()


def call(*args: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["explain", *args])
    return code, out.getvalue(), err.getvalue()


def test_the_last_line_of_a_log_counts(tmp_path: Path) -> None:
    older = LINE.replace('"slowdown":1.25', '"slowdown":3')
    log = tmp_path / "server.log"
    log.write_text("loading\n" + older + LINE.rstrip() + "\x1b[0m\nlast words\n" + LINE[: len(LINE) // 2 * 2 - 40])
    assert read_report(str(log)) == REPORT
    assert read_report(str(log)) != report_of_lines([older], "older")


TIMED = REPORT._replace(
    phases={"draft": 0.01, "verify": 0.06, "extend": 0.02, "fixed": 0.01},
    errors=(0, 1, 0, 0, 1, 0, 3, *[0] * 11),
)


def test_what_the_head_reads_of_prompts_comes_from_log_and_metrics(
    tmp_path: Path, server: tuple[str, dict[str, str]]
) -> None:
    url, pages = server
    report = REPORT._replace(reading=0.002)
    log = tmp_path / "server.log"
    log.write_text(f"eagle-plugin: policy; policy-report {report.as_json()}\n")
    pages["/metrics"] = metrics_of(report)
    for source in (str(log), url):
        found = read_report(source)
        assert found.reading == 0.002 and found.rates() == pytest.approx(report.rates())
        for shape, expected in found.expected.items():
            assert expected == pytest.approx(report.expected[shape])
        assert "to draft, the head reads prompts: 2.00 ms per output token" in call(source)[1]
    assert found.gain(CAPS) < 0.95 * REPORT.gain(CAPS)


def test_phases_and_errors_come_from_log_and_metrics(tmp_path: Path, server: tuple[str, dict[str, str]]) -> None:
    url, pages = server
    log = tmp_path / "server.log"
    log.write_text(f"eagle-plugin: policy; policy-report {TIMED.as_json()}\n")
    pages["/metrics"] = metrics_of(TIMED)
    for found in (read_report(str(log)), read_report(url)):
        assert (found.phases, found.errors) == (TIMED.phases, TIMED.errors)
    lines = summary(TIMED)
    assert lines[4].endswith("against their predictions; |measured / predicted - 1| of one step: 6.3% in the median")
    assert lines[5] == "of the predicted time of these steps: draft 10.0%, verify 60.0%, extend 20.0%, fixed 10.0%"


def test_errors_of_a_log_that_is_being_written() -> None:
    whole = f"eagle-plugin: policy; policy-report {TIMED.as_json()}\n"
    more = whole.replace("[0,1,0,0,1,0,3,", "[0,1,0,0,1,0,4,")
    assert counted_errors("loading\n" + whole + more + "200 OK\n")[6] == 4
    assert counted_errors(whole + more[:-20]) == TIMED.errors
    assert counted_errors("") == counted_errors("200 OK\n") == ()


def test_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(LINE))
    assert read_report("-") == REPORT


@pytest.mark.parametrize("path", ["", "/", "/v1", "/metrics"])
def test_a_running_server(path: str, server: tuple[str, dict[str, str]]) -> None:
    url, pages = server
    pages["/metrics"] = metrics_of(REPORT)
    found = read_report(url + path)
    assert found._replace(expected={}) == REPORT._replace(expected={})
    for shape, expected in REPORT.expected.items():
        assert found.expected[shape] == pytest.approx(expected)


def test_of_several_ranks_the_one_with_the_most_rounds(server: tuple[str, dict[str, str]]) -> None:
    url, pages = server
    idle = REPORT._replace(requests=1, totals={PLAIN: ShapeTotals(1, 1, 1)})
    pages["/metrics"] = metrics_of(idle, REPORT)
    assert read_report(url).requests == 2
    pages["/metrics"] = metrics_of(REPORT, idle)
    assert read_report(url).requests == 2


def test_a_file_of_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.txt").write_text(metrics_of(REPORT))
    assert read_report(str(tmp_path / "metrics.txt")).present == CAPS


def test_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LINE)
    code, out, err = call(str(tmp_path / "log"), "--picture", str(tmp_path / "a.png"))
    assert code == 0 and not err
    assert summary(REPORT) == out.splitlines()[:5]
    assert out.splitlines()[1] == "2/4/8 is expected to give 120.0 tokens/s, 1/1/2 instead of it 106.7 (-11.1%)"
    assert out.splitlines()[4] == "5 timed steps took +76.0% against their predictions"
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "/" in line.split(" ")[0]}
    assert rows["2/4/8*"] == ["50.00", "3.00", "120.0", "1.20x", "71.4%", "2.50", "50.00", "+100.0%"]
    assert rows["1/1/2"] == ["30.00", "1.60", "106.7", "1.07x"]
    assert rows["0/1/1"] == ["20.00", "1.00", "100.0", "1.00x", "28.6%", "1.00", "20.00", "-20.0%"]
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG" and len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_lines_of_the_picture() -> None:
    wide = REPORT._replace(
        expected=REPORT.expected | {Shape(1, 4, 8): Expected(0.1, 1.0), Shape(1, 2, 4): Expected(1, 1)}
    )
    assert lines_by_depth(wide) == {0: [PLAIN], 1: [SMALL, Shape(1, 2, 4), Shape(1, 4, 8)], 2: [CAPS]}


def test_before_anything_was_timed() -> None:
    untimed = REPORT._replace(totals={CAPS: ShapeTotals(1, 2, 1)}, factors=())
    assert "no step was timed yet" in summary(untimed)[-1] and not any("depth" in line for line in summary(untimed))


SERVES = plugin_serves("EAGLE3", CAPS, "native")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no line of the policy (policy-report): it is not the log of a server on the plugin"),
        ("INFO: ready\n", "it is not the log of a server on the plugin"),
        (f"{SERVES}\n", "its server has written none yet: it writes one per EAGLE_POLICY_LOG_SECONDS (60)"),
        (f"{SERVES}\n{without_policy(CAPS, 'fixed')}\n", "its server has no policy, EAGLE_POLICY is fixed"),
        (f"{without_policy(CAPS, 'random')}\n{SERVES}\n", "its server has no policy, EAGLE_POLICY is random"),
        (LINE[:-30], "has an unreadable line of the policy: its JSON is not whole"),
        (LINE.replace('"version":1', '"version":7'), "its version is 7, wanted 1; use its server's eagle-plugin"),
    ],
)
def test_a_log_that_tells_nothing(text: str, why: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(text)
    code, out, err = call(str(log))
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"error: {log} ") and why in err


FIXED = PolicyReport("fixed", CAPS, CAPS, totals=REPORT.totals)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "/metrics is not there (404): start SGLang with --enable-metrics, or name the server's log"),
        ("", "has no metrics of eagle-plugin: its server is not on the plugin, or has decoded nothing yet"),
        ("# TYPE up gauge\nup 1\n", "has no metrics of eagle-plugin"),
        ("<html>{\n", "is no text of Prometheus metrics"),
        (metrics_of(FIXED), "has no metrics of a policy: its server has none (EAGLE_POLICY is not auto)"),
        (metrics_of(REPORT).replace("eagle_plugin:slowdown{", "eagle_plugin:other{"), "has metrics of another form"),
    ],
)
def test_a_server_that_tells_nothing(text: str | None, why: str, server: tuple[str, dict[str, str]]) -> None:
    url, pages = server
    if text is not None:
        pages["/metrics"] = text
    code, out, err = call(url)
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"error: {url}") and why in err


def test_an_address_without_http() -> None:
    for address in ("127.0.0.1:30000", "server.example:8000/metrics"):
        with pytest.raises(SourceError, match=f"{address} is no file; for a server begin the address with http://"):
            read_report(address)
    with pytest.raises(SourceError, match="server.log cannot be read"):
        read_report("server.log")


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(SourceError, match="http://127.0.0.1:9 does not answer .*: check address and port"):
        read_report("http://127.0.0.1:9")
    with pytest.raises(SourceError, match="does not answer"):
        read_report("http://")
