"""`eagle-plugin data generate`: the target answers the prompts, and its answers become rows to train on."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eagle_plugin.data.generation.endpoints import FIRST_PAUSE_S, Endpoint, EndpointDead, Refused
from eagle_plugin.data.generation.journal import Journal
from eagle_plugin.data.generation.rollout import Played, deal_temperature, play
from eagle_plugin.data.rows import DataError
from eagle_plugin.data.sources.prompts import Prompt, read_prompts

CONNECT_TIMEOUT_S = 10.0
EXAMPLES = """\
examples:
  python -m sglang.launch_server --model-path TARGET --port 30000       a server to ask, or: vllm serve TARGET
  eagle-plugin data generate prompts.jsonl --endpoint http://127.0.0.1:30000 --out rows.jsonl
  eagle-plugin data generate prompts.jsonl --endpoint http://a:30000 --endpoint http://b:30000 --out rows.jsonl

Run the same command again to go on after an interruption: finished prompts are not asked again. Prompts that gave no
row, and why, are in rows.skipped.jsonl; take a line out to have its prompt asked again. Without --temperature a prompt
is played at the temperature of its own request, or at 0 or 1 if it has none. Prompts of one temperature are asked
together, because servers are slower on batches that mix greedy and sampled requests.
"""


@dataclass
class Tally:
    """What a run did, for the table at its end."""

    rows: Counter[tuple[str, float | None, str]] = field(default_factory=Counter)  # by source, temperature, finish
    skipped: Counter[str] = field(default_factory=Counter)  # by kind
    reasons: dict[str, str] = field(default_factory=dict)  # one example of a kind
    prompt_tokens: int = 0
    response_tokens: int = 0
    postponed: int = 0  # failed, and asked again by the next run
    seconds: float = 0.0

    def add(self, played: Played) -> None:
        """Count one conversation."""
        for row in played.rows:
            self.rows[row.source, row.temperature, row.finish] += 1
            self.prompt_tokens += len(row.prompt_ids)
            self.response_tokens += len(row.response_ids)
        if played.skip:
            self.skip(played.skip.kind, played.skip.reason)

    def skip(self, kind: str, reason: str) -> None:
        """Count a turn without a row."""
        self.skipped[kind] += 1
        self.reasons.setdefault(kind, reason)


@dataclass(frozen=True)
class Settings:
    """How prompts are played."""

    max_tokens: int = 192
    temperatures: Sequence[float] | None = None
    concurrency: int = 64  # requests in flight per endpoint
    timeout_s: float = 600.0  # of one request
    model: str = ""
    is_private: Callable[[str], bool] | None = None
    first_pause_s: float = FIRST_PAUSE_S


class Queue:
    """The prompts still to be played, a temperature at a time, in file order; read from disk as they are needed."""

    def __init__(self, path: Path, done: set[str], settings: Settings) -> None:
        self._path, self._settings = path, settings
        self._done = frozenset(done)
        ids: set[str] = set()
        temperatures: set[float] = set()
        for prompt in read_prompts(path):
            if prompt.id in ids:
                raise DataError(f"{path} has two prompts with the id {prompt.id!r}; wanted one: give each its own id")
            ids.add(prompt.id)
            temperatures.add(deal_temperature(prompt, settings.temperatures))
        self.total, self.left = len(ids), len(ids - done)
        self._returned: list[tuple[Prompt, float]] = []
        self._fresh = self._read(sorted(temperatures))

    def take(self) -> tuple[Prompt, float] | None:
        """The next prompt and its temperature; None when there is none at the moment."""
        return self._returned.pop() if self._returned else next(self._fresh, None)

    def give_back(self, prompt: Prompt, temperature: float) -> None:
        """Put a prompt back that another endpoint must play."""
        self._returned.append((prompt, temperature))

    @property
    def waiting(self) -> bool:
        """Whether prompts were put back."""
        return bool(self._returned)

    def _read(self, temperatures: list[float]) -> Iterator[tuple[Prompt, float]]:
        for temperature in temperatures:
            for prompt in read_prompts(self._path):
                if prompt.id not in self._done and deal_temperature(prompt, self._settings.temperatures) == temperature:
                    yield prompt, temperature


async def generate(
    prompts: Path, urls: Sequence[str], journal: Journal, settings: Settings, console: Console
) -> tuple[Tally, list[Endpoint]]:
    """Play every prompt that the journal does not have; returns what was done and the endpoints, dead ones included.

    An endpoint that stops answering is left out and its prompts go to the others.

    Raises:
        DataError: no endpoint answers, none is left, or one gives no token ids.
    """
    queue = Queue(prompts, journal.done, settings)
    tally, start = Tally(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} prompts"))
    if not queue.left:
        return tally, []
    timeout = httpx.Timeout(settings.timeout_s, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        endpoints = [Endpoint(url, client, settings.model, settings.first_pause_s) for url in urls]
        await asyncio.gather(*(_open(endpoint, console) for endpoint in endpoints))
        with Progress(*columns, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("generating", total=queue.total, completed=queue.total - queue.left, rate="")

            async def work(endpoint: Endpoint) -> None:
                while not endpoint.dead and (item := queue.take()):
                    prompt, temperature = item
                    try:
                        played = await play(
                            prompt,
                            endpoint,
                            temperature=temperature,
                            max_tokens=settings.max_tokens,
                            is_private=settings.is_private,
                        )
                    except EndpointDead as error:
                        queue.give_back(prompt, temperature)
                        _leave_out(endpoint, str(error), console)
                        return
                    except Refused as error:
                        tally.postponed += 1
                        tally.skip("failed for now", str(error))
                        continue
                    if played.rows:
                        journal.keep(played.rows)
                    if played.skip:
                        journal.skip(prompt.id, played.skip.turn, played.skip.reason)
                    tally.add(played)
                    rate = tally.response_tokens / (time.monotonic() - start)
                    bar.update(task, advance=1, rate=f"{rate:,.0f} tokens/s")

            while True:
                alive = [endpoint for endpoint in endpoints if not endpoint.dead]
                if not alive:
                    why = "; ".join(f"{endpoint.url}: {endpoint.dead}" for endpoint in endpoints)
                    raise DataError(
                        f"no endpoint answers ({why}); {sum(tally.rows.values())} new rows are in {journal.out}: "
                        "start a server and run the same command again"
                    )
                await _together([work(endpoint) for endpoint in alive for _ in range(settings.concurrency)])
                if not queue.waiting:
                    break
    tally.seconds = time.monotonic() - start
    return tally, endpoints


async def _open(endpoint: Endpoint, console: Console) -> None:
    try:
        await endpoint.open()
    except EndpointDead as error:
        _leave_out(endpoint, str(error), console)


def _leave_out(endpoint: Endpoint, reason: str, console: Console) -> None:
    if not endpoint.dead:
        endpoint.dead = reason
        console.print(f"[yellow]left out:[/] {escape(endpoint.url)} ({escape(reason)})")


async def _together(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run them all; the first error ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def summary(tally: Tally, endpoints: Sequence[Endpoint], journal: Journal) -> Table:
    """What a run did, as one table."""
    table = Table("what", "count", "", title=f"{journal.out}", title_justify="left")
    kept = sum(tally.rows.values())
    for (source, temperature, finish), count in sorted(tally.rows.items(), key=str):
        table.add_row(escape(f"{source}, temperature {temperature}, {finish}"), f"{count:,}", f"{count / kept:.1%}")
    table.add_row("rows kept", f"{kept:,}", "100.0%" if kept else "-", style="bold")
    for kind, count in tally.skipped.most_common():
        table.add_row(f"no row: {kind}", f"{count:,}", escape(tally.reasons[kind]), style="yellow")
    if journal.resumed:
        table.add_row("prompts done by earlier runs", f"{journal.resumed:,}", "")
    rate = tally.response_tokens / max(tally.seconds, 1e-9)
    table.add_row("response tokens", f"{tally.response_tokens:,}", f"{rate:,.0f} tokens/s")
    table.add_row("prompt tokens", f"{tally.prompt_tokens:,}", "")
    for endpoint in endpoints:
        table.add_row(escape(endpoint.url), "left out" if endpoint.dead else "served", escape(endpoint.dead))
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="eagle-plugin data generate",
        description="Let the target answer the prompts and write its answers, as token ids, to train a head on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", type=Path, help="JSON lines of `eagle-plugin data prepare` or `data builtin`")
    parser.add_argument(
        "--endpoint",
        action="append",
        required=True,
        metavar="URL",
        help="an SGLang or vLLM server of the target; repeat it for several servers",
    )
    parser.add_argument("--out", type=Path, required=True, help="file of rows; an existing one is gone on with")
    parser.add_argument("--model", default="", help="the name that the servers give the target (default: the first)")
    parser.add_argument("--max-tokens", type=int, default=192, help="of one answer (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        help="deal the prompts among these (default: each prompt's own, and 0 or 1 for those without one)",
    )
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight per endpoint (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one request (default: %(default)s)")
    parser.add_argument("--privacy-scan", action="store_true", help="drop answers that hold private data")
    options = parser.parse_args(argv)
    for name in ("max_tokens", "concurrency", "timeout"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, wanted at least 1")
    if any(temperature < 0 for temperature in options.temperature or ()):
        parser.error(f"--temperature is {min(options.temperature)}, wanted at least 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Generate rows for the prompts that have none yet; 1 where some failed for now."""
    options = parse(argv)
    console = Console(stderr=True)
    settings = Settings(
        max_tokens=options.max_tokens,
        temperatures=options.temperature,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        model=options.model,
        is_private=_load_scan() if options.privacy_scan else None,
    )
    with Journal(options.out) as journal:
        tally, endpoints = asyncio.run(generate(options.prompts, options.endpoint, journal, settings, console))
        Console().print(summary(tally, endpoints, journal))
    if tally.postponed:
        console.print(f"{tally.postponed} prompts failed for now; run the same command again to ask them again")
    return 1 if tally.postponed else 0


def _load_scan() -> Callable[[str], bool]:
    from eagle_plugin.data.privacy.redact import scan  # needs an extra of its own

    scan("")  # makes the scanner: what it lacks is an error now, not at the first answer
    return scan
