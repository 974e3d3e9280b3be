"""Files and strings of other origins with other values and bytes: read, or refused with a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from changed_inputs import LONG, as_json, changed, damaged, try_inputs
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from eagle_plugin.bench.policy_sources import SourceError, counted_errors, report_of_lines, report_of_metrics
from eagle_plugin.bench.questions import read_questions
from eagle_plugin.common.deploy_folder import REQUEST, Served
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.learning.data.privacy.filter import PrivacyFilter
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.formats import read_records
from eagle_plugin.learning.data.traffic.exchanges import records_of
from eagle_plugin.learning.deploy.counts import CountsError, counts_of
from eagle_plugin.learning.jobs.recipe import read_job
from eagle_plugin.learning.train.recipe import read_recipe
from eagle_plugin.policy.metrics import families
from eagle_plugin.policy.report import MARK, Expected, PolicyReport, ShapeTotals
from eagle_plugin.runtime.head_mailbox import HeadMailbox
from eagle_plugin.runtime.request_middleware import RequestMiddleware
from eagle_plugin.traffic.frames import Exchange

ROOT = Path(__file__).parents[2]

TREE = Shape(2, 2, 4)
REPORT = PolicyReport(
    "auto",
    TREE,
    TREE,
    requests=2,
    prefix_tokens=200,
    factors=(0.9, 0.8),
    totals={TREE: ShapeTotals(8, 17, 4, 2, 0.1, 0.1), PLAIN: ShapeTotals(3, 3, 1, 0, 0.0, 0.0)},
    expected={TREE: Expected(0.05, 2.1), PLAIN: Expected(0.03, 1.0)},
)
COUNTED = """# TYPE eagle_plugin:verify_rounds_total counter
eagle_plugin:verify_rounds_total{model_name="m"} 40.0
# TYPE eagle_plugin:accepted_at_depth_total counter
eagle_plugin:accepted_at_depth_total{depth="1",model_name="m"} 30.0
eagle_plugin:accepted_at_depth_total{depth="2",model_name="m"} 10.0
"""


class Collector:
    def collect(self) -> Any:
        return families([(REPORT, {"model_name": "m", "engine": "0"})])


def metrics() -> bytes:
    registry = CollectorRegistry()
    registry.register(Collector())  # type: ignore[arg-type]
    return generate_latest(registry) + COUNTED.encode()


@LONG
def test_metrics(long: bool) -> None:
    assert report_of_metrics(metrics().decode(), "here").totals == REPORT.totals
    assert counts_of(metrics().decode()).accept_length == 2.0

    def attempt(content: bytes) -> None:
        text = content.decode(errors="replace")
        with contextlib.suppress(SourceError):
            report_of_metrics(text, "here")
        with contextlib.suppress(CountsError):
            counts_of(text)

    try_inputs(damaged(metrics()), attempt, long)


@LONG
def test_lines_of_a_log(long: bool) -> None:
    line = f"[2026-01-01] eagle-plugin: a sentence; {MARK}"
    report = json.loads(REPORT.as_json())

    def attempt(content: bytes) -> None:
        log = content.decode(errors="replace")
        with contextlib.suppress(SourceError):
            found = report_of_lines(log.splitlines(), "here")
            PolicyReport.from_json(found.as_json())
        counted_errors(log)

    documents = changed(report).map(lambda x: line.encode() + as_json(x) + b"\n")
    try_inputs(st.one_of(documents, damaged(line.encode() + as_json(report) + b"\n")), attempt, long)


@LONG
@pytest.mark.parametrize("kind", ["job", "training"])
def test_recipes(kind: str, long: bool, tmp_path: Path) -> None:
    job = (ROOT / "examples/recipes/smollm2-135m-instruct.yaml").read_bytes()
    values = yaml.safe_load(job)
    read, given = {"job": (read_job, values), "training": (read_recipe, values["train"]["head"])}[kind]
    written = job if kind == "job" else yaml.safe_dump(given).encode()
    place = tmp_path / "recipe.yaml"

    def attempt(content: bytes) -> None:
        place.write_bytes(content)
        with contextlib.suppress(UserError):
            read(place)

    try_inputs(st.one_of(changed(given).map(as_json), damaged(written)), attempt, long)


CHAT = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
}
EVENTS = [
    {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}]},
    {"id": "1", "choices": [{"index": 0, "delta": {"content": "lo", "token_ids": [1]}, "finish_reason": "stop"}]},
    {"id": "1", "choices": [], "usage": {"completion_tokens": 2}, "prompt_token_ids": [5, 6]},
]
ANSWER = {
    "id": "1",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop", "token_ids": [1, 2]}
    ],
    "prompt_token_ids": [5, 6],
    "usage": {"completion_tokens": 2},
}
RECORDS: dict[str, Any] = {
    "chat": CHAT,
    "sharegpt": {"id": "q", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes"}]},
    "completions": {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 9},
    "batch": {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
}


@LONG
@pytest.mark.parametrize("packed", ["lines", "array", "gzip"])
def test_files_of_prompts(packed: str, long: bool, tmp_path: Path) -> None:
    place = tmp_path / f"prompts.{'jsonl.gz' if packed == 'gzip' else 'jsonl'}"

    def file_of(values: list[Any]) -> bytes:
        parts = [as_json(value) for value in values]
        content = b"[" + b",".join(parts) + b"]" if packed == "array" else b"\n".join(parts) + b"\n"
        return gzip.compress(content) if packed == "gzip" else content

    def attempt(content: bytes) -> None:
        place.write_bytes(content)
        for skip_broken in (False, True):
            with contextlib.suppress(DataError):
                list(read_records(str(place), skip_broken=skip_broken))

    lists = st.one_of(*(changed([record] * 3).map(_as_list) for record in RECORDS.values()))
    bytewise = st.one_of(*(damaged(file_of([record] * 3)) for record in RECORDS.values()))
    try_inputs(st.one_of(lists.map(file_of), bytewise), attempt, long)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@LONG
@pytest.mark.parametrize("stream", [False, True])
def test_recorded_exchanges(stream: bool, long: bool) -> None:
    """What clients and engines say goes through the writer of records, which must go on."""
    private = PrivacyFilter(SimpleNamespace(mode="off", tokenizer=None))  # type: ignore[arg-type]
    routes = ("", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")

    def attempt(given: tuple[bytes, bytes, str]) -> None:
        request, answer, route = given
        for outcome in records_of(Exchange(0.0, request, answer, route), private):
            assert outcome.dropped or outcome.line

    def streamed(events: Any) -> bytes:
        return b"".join(b"data: " + as_json(event) + b"\n\n" for event in _as_list(events)) + b"data: [DONE]\n\n"

    wanted = EVENTS if stream else ANSWER
    write = streamed if stream else as_json
    requests = st.one_of(*(changed(record).map(as_json) for record in RECORDS.values()), st.just(as_json(CHAT)))
    answers = st.one_of(changed(wanted).map(write), damaged(write(wanted)))
    try_inputs(st.tuples(requests, answers, st.sampled_from(routes)), attempt, long)


class Ours(RequestMiddleware):
    parameters = "custom_params"


@LONG
def test_bodies_of_requests(long: bool) -> None:
    """The application gets a body, or the client a refusal; the middleware itself never fails."""
    body = CHAT | {"eagle_plugin": {"draft": True, "sources": ["head", "lookup"]}, "custom_params": {"a": 1}}

    def attempt(given: tuple[bytes, bytes | None]) -> None:
        asyncio.run(_through(*given))

    headers = st.one_of(st.none(), st.binary(max_size=30), damaged(b"draft=off; sources=head,lookup"))
    bodies = st.one_of(changed(body).map(as_json), damaged(as_json(body)))
    try_inputs(st.tuples(bodies, headers), attempt, long)


async def _through(body: bytes, header: bytes | None) -> None:
    seen: list[bytes] = []
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        seen.append(message["body"])
        length = dict(scope["headers"])[b"content-length"]
        assert int(length) == len(message["body"])
        await send({"type": "http.response.start", "status": 422, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode())]
    headers += [] if header is None else [(b"x-eagle-plugin", header)]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "root_path": "", "headers": headers}
    await Ours(application)(scope, receive, send)
    assert len(seen) == 1 and len(sent) == 2
    if sent[0]["status"] == 400:
        fault = json.loads(sent[1]["body"])["error"]
        assert fault["code"] == 400 and "\n" not in fault["message"] and len(fault["message"]) < 300


@LONG
def test_requests_in_the_mailbox(long: bool, tmp_path: Path) -> None:
    """The server goes on with the head that it has, or with the one that was named."""
    tmp_path.chmod(0o700)
    exchanged: list[Path] = []
    numbers = iter(range(10**9))
    mailbox = HeadMailbox(
        tmp_path,
        Served("sglang", "/models/t", "/heads/old", "EAGLE3"),
        exchanged.append,
        logging.getLogger("mailbox"),
        clock=lambda: float(next(numbers)),
    )
    request = {"id": "1", "head": "/heads/new"}

    def attempt(content: bytes) -> None:
        (tmp_path / REQUEST).unlink(missing_ok=True)
        (tmp_path / REQUEST).write_bytes(content)
        mailbox.look()

    try_inputs(st.one_of(changed(request).map(as_json), damaged(as_json(request))), attempt, long)
    assert exchanged


@LONG
def test_questions(long: bool, tmp_path: Path) -> None:
    question = {"id": "a", "group": "b", "prompt": "What?"}
    place = tmp_path / "questions.jsonl"

    def attempt(content: bytes) -> None:
        place.write_bytes(content)
        with contextlib.suppress(ValueError):
            read_questions([place])

    written = as_json(question) + b"\n"
    try_inputs(st.one_of(changed(question).map(as_json), damaged(written)), attempt, long)
