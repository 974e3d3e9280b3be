"""Accidents around a command, not in its files: a port in use, a server that is silent, memory that runs out, a second
job in the same folder, a recipe that is a trap."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from filelock import FileLock
from token_endpoint import TokenEndpoint

# Every level has the one below nine times: 9^9 values, from 300 bytes.
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NO_DATE = "target: here\na: 2024-13-45\n"
ITSELF = "target: here\na: &a [*a]\n"
KILLED = "import os, signal, time; print('loading', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
SERVE = "serve --target {target} --head {head} --out {out}"
JOBS = "--jobs {own}/jobs"

Around = Callable[[dict[str, str]], contextlib.AbstractContextManager[None]]  # adds places for the command


class Scene(NamedTuple):
    """args: all of the command; {own} is an empty folder. wanted: parts of its one sentence."""

    args: str
    wanted: tuple[str, ...]
    around: Around


@contextlib.contextmanager
def _nothing(places: dict[str, str]) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _listener(places: dict[str, str]) -> Iterator[None]:
    """A program that accepts connections and never answers."""
    from eagle_plugin.learning.data.generation import endpoints

    with socket.socket() as program, mock.patch.object(endpoints, "LISTING_S", 0.3):
        program.bind(("127.0.0.1", 0))
        program.listen(8)
        places["port"] = str(program.getsockname()[1])
        yield


@contextlib.contextmanager
def _hung_engine(places: dict[str, str]) -> Iterator[None]:
    """A server that names its model, and whose engine hangs."""
    from eagle_plugin.learning.data.generation import endpoints

    with TokenEndpoint(delay_s=5.0) as server, mock.patch.object(endpoints, "FIRST_TOKEN_S", 0.3):
        places["url"] = server.url
        yield


@contextlib.contextmanager
def _failing_server(places: dict[str, str]) -> Iterator[None]:
    """A program that answers everything with HTTP 500."""
    from http.server import BaseHTTPRequestHandler

    with TokenEndpoint() as server:

        def do_GET(handler: BaseHTTPRequestHandler) -> None:
            handler.send_error(500, "the engine has no memory left")

        with mock.patch.object(server._server.RequestHandlerClass, "do_GET", do_GET):
            places["url"] = server.url
            yield


@contextlib.contextmanager
def _killed_engine(places: dict[str, str]) -> Iterator[None]:
    """An engine that the system kills while it loads, however often it is started."""
    from eagle_plugin.bench.engines import ENGINES

    engine = dataclasses.replace(ENGINES["sglang"], command=lambda spec, port: [sys.executable, "-c", KILLED])
    with mock.patch.dict(ENGINES, {"sglang": engine}):
        yield


@contextlib.contextmanager
def _running_job(places: dict[str, str]) -> Iterator[None]:
    """Another process holds the folder of the job."""
    from eagle_plugin.learning.jobs.locks import LOCK

    for name in ("out", "own/jobs/one"):
        (Path(places["own"]) / name.removeprefix("own/")).mkdir(parents=True, exist_ok=True)
    places["out"] = f"{places['own']}/out"
    jobs = Path(places["own"], "jobs")
    (jobs / "one.yaml").write_text(Path(places["job"]).read_text())
    with FileLock(Path(places["out"], LOCK)), FileLock(jobs / "one" / LOCK):
        yield


def _recipe(text: str) -> Around:
    @contextlib.contextmanager
    def around(places: dict[str, str]) -> Iterator[None]:
        path = Path(places["own"], "trap.yaml")
        path.write_text(text)
        places["trap"] = str(path)
        yield

    return around


SCENES = {
    "port in use": Scene(f"{SERVE} --port {{port}}", ("port ", "Address already in use", "--port"), _listener),
    "no port": Scene(f"{SERVE} --port 99999", ("99999 is no TCP port, wanted 1 to 65535",), _nothing),
    "silent server": Scene(
        "data generate {prompts} --endpoint http://127.0.0.1:{port} --out {own}/rows.jsonl",
        ("no endpoint answers", "accepted, and no answer came"),
        _listener,
    ),
    "hung engine": Scene(
        "data generate {prompts} --endpoint {url} --out {own}/rows.jsonl",
        ("no endpoint answers", "lists its model, and gave no token within"),
        _hung_engine,
    ),
    "server killed": Scene(
        SERVE, ("most likely for lack of memory", "were free when it started", "need at least", "--concurrency"),
        _killed_engine,
    ),
    "server killed in a job": Scene(
        "optimize {job} --out {own}/out", ("most likely for lack of memory", "need at least", "generate.concurrency"),
        _killed_engine,
    ),
    "folder of another job": Scene(
        "optimize {job} --out {out}", ("in use by another running job", "--out"), _running_job
    ),
    "running job resumed": Scene(
        f"optimize resume one {JOBS}", ("in use by another running job", "--set out=DIR"), _running_job
    ),
    "option of another command": Scene(
        f"optimize resume one {JOBS} --data {{own}}", ("unrecognized arguments: --data",), _running_job
    ),
    "abbreviated option": Scene(
        f"optimize create one {JOBS} --workflow base-own --data {{own}}", ("unrecognized arguments: --data",), _nothing
    ),
    "recipe of aliases": Scene("train {trap} --out {own}/out", ("aliases (*name)",), _recipe(ALIASES)),
    "job of aliases": Scene("optimize {trap} --out {own}/out", ("aliases (*name)",), _recipe(ALIASES)),
    "estimate of aliases": Scene("optimize estimate {trap}", ("aliases (*name)",), _recipe(ALIASES)),
    "estimate without a number": Scene("optimize estimate {job}", ("number with --dialogues",), _nothing),
    "recipe in itself": Scene("train {trap} --out {own}/out", ("nested too deeply",), _recipe(ITSELF)),
    "no date": Scene("train {trap} --out {own}/out", ("month must be in 1..12",), _recipe(NO_DATE)),
    "no date set": Scene("train {recipe} --out {own}/out --set a=2024-13-45", ("is not YAML",), _nothing),
    "watched server fails": Scene(
        "watch {url} --expect 2 --once", ("does not answer with metrics (HTTP 500",), _failing_server
    ),
}  # fmt: skip
