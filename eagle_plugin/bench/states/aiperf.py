"""The load of every cell once more, by aiperf: a load generator of others, against which our own figures are checked.

aiperf needs packages that no engine can have beside it, so it runs from an environment of its own, as a program.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.bench.cells import Cell, Plan
from eagle_plugin.bench.closed_loop import Ask
from eagle_plugin.bench.engine import EngineEndpoint
from eagle_plugin.bench.load import connect, flush_prefix_cache, served_model
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.states.configs import NAMES, State
from eagle_plugin.bench.states.document import AiperfRow
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.errors import UserError

ENVIRONMENT = Path(".venv-aiperf/bin/aiperf")  # of `make env-aiperf`
SECONDS = 3600.0  # the longest run
RESULT = "profile_export_aiperf.json"
# Names in the result, and which statistic of each is comparable with ours: medians of requests, means over the run.
TIMES = {
    "ttft_ms": ("time_to_first_token", "p50"),
    "tpot_ms": ("inter_token_latency", "p50"),  # aiperf: (latency - TTFT) / (tokens - 1)
    "itl_ms": ("inter_chunk_latency", "p50"),
    "requests_per_s": ("request_throughput", "avg"),
    "tokens_per_s": ("output_token_throughput", "avg"),
    "otps": ("output_token_throughput_per_user", "p50"),
}


class AiperfError(UserError):
    """aiperf cannot be run, or measured nothing."""


def find_aiperf(named: str) -> Path:
    """The program: the named one, that of `make env-aiperf`, or the one on PATH. Raises AiperfError."""
    found = shutil.which(named or (str(ENVIRONMENT) if ENVIRONMENT.is_file() else "aiperf"))
    if found is None:
        raise AiperfError(
            f"--aiperf: {named or 'aiperf'} is no program that can be run; make an environment with it "
            "(`make env-aiperf`, or pip install aiperf in one of its own), and give --aiperf PATH"
        )
    return Path(found).absolute()


def measure_by_aiperf(
    program: Path,
    servers: Mapping[State, Server],
    plan: Plan,
    questions: Mapping[str, Sequence[Question]],
    target: Path,
    folder: Path,
    steps: Steps,
) -> list[AiperfRow]:
    """Ask every server the questions of the first repeat of every cell, one server at a time.

    target: folder of the tokenizer. folder: gets a folder of aiperf's own files per measurement.

    Raises:
        AiperfError: aiperf failed, or requests of it did.
        LoadError: a server does not answer.
    """
    rows: list[AiperfRow] = []
    total = len(plan.repeats) * len(servers)
    with steps.step("measuring by aiperf") as step:
        for cell in plan.repeats:
            asks = plan.phase(cell, 0, questions).asks
            for state, server in servers.items():
                step.update(f"{cell}, {NAMES[state]}", len(rows) / total)
                own = folder / f"{cell.prompts}-{cell.concurrency}-{state}"
                server.resume()
                try:
                    flush_prefix_cache(server.endpoint)
                    model = asyncio.run(_model(server.endpoint))
                    bodies = [body_of(ask, model, cell.temperature) for ask in asks]
                    command = command_of(program, server.url, model, target, cell.concurrency, len(asks), own)
                    _run(command, bodies, own)
                finally:
                    server.pause()
                rows.append(read_row(own / RESULT, state, cell, len(asks)))
    return rows


def body_of(ask: Ask, model: str, temperature: float) -> dict[str, Any]:
    """The body of a request as our own load has it, without what only one engine knows."""
    return {
        "model": model,
        "messages": ask.question.messages or [{"role": "user", "content": ask.question.prompt}],
        "max_tokens": ask.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def command_of(
    program: Path, url: str, model: str, target: Path, clients: int, requests: int, folder: Path
) -> list[str]:
    """The command line: a closed loop over the bodies in `folder`, in their order."""
    return [
        str(program),
        "profile",
        *("--model", model),
        *("--url", url),
        *("--endpoint-type", "chat"),
        "--streaming",
        *("--tokenizer", str(target)),
        *("--input-file", str(folder / "bodies.jsonl")),
        *("--custom-dataset-type", "raw_payload"),
        *("--concurrency", str(clients)),
        *("--request-count", str(requests)),
        "--use-server-token-count",
        *("--artifact-dir", str(folder)),
        *("--ui", "none"),
    ]


async def _model(server: EngineEndpoint) -> str:
    async with connect(server) as client:
        return await served_model(client)


def _run(command: Sequence[str], bodies: Sequence[Mapping[str, Any]], folder: Path) -> None:
    write_output(folder / "bodies.jsonl", [json.dumps(body) + "\n" for body in bodies])
    # With this variable aiperf takes the path of a tokenizer for a name of the hub, and refuses it.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AiperfError(
            f"{command[0]} did not run ({error}); give --aiperf another program, or leave it out"
        ) from error
    write_output(folder / "aiperf.log", [done.stdout, done.stderr])
    if done.returncode:
        last = next((line for line in reversed((done.stderr or done.stdout).splitlines()) if line.strip()), "nothing")
        raise AiperfError(
            f"aiperf ended with code {done.returncode}, and its last line was: {last.strip()}; see {folder}/aiperf.log"
        )


def read_row(path: Path, state: State, cell: Cell, requests: int) -> AiperfRow:
    """Read one result of aiperf.

    Raises:
        AiperfError: it is missing or of another form, or not all requests were answered.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        answered = int(found["request_count"]["avg"])
        times = {name: round(float(found[metric][statistic]), 3) for name, (metric, statistic) in TIMES.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AiperfError(f"{path} is no result of aiperf 0.13 ({error!r}); see the log beside it") from error
    if answered < requests or not all(map(math.isfinite, times.values())):
        raise AiperfError(f"{path}: {answered} of {requests} requests were answered; see the log beside it")
    return AiperfRow(state=state, concurrency=cell.concurrency, prompts=cell.prompts, requests=answered, **times)
