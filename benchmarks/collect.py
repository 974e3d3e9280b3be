"""Measure three ways from prompts to a feature store: tokens per CPU-second, bytes per token, texts and states equal.

    python benchmarks/collect.py [--prompts 48] [--max-tokens 96] [--engine vllm] [--out out]

- `two stages`: `data generate` at a plain server, then `data features` by transformers;
- `collect`: `data collect` at a server with the plugin and EAGLE_FEATURES;
- `engine features`: `data generate` at the plain server, then `data features --endpoint` at the one with the plugin.

CPU-seconds are those of the servers (the writer of features included) from the first request to the last, and those of
the commands, less what the same command takes when nothing is left to do: imports and the loading of models are a share
of any run that depends on its size alone. Everything is computed in float32 at temperature 0, so that texts are equal.
The result is in out/collect.json; the exit code is 1 if texts or states differ, or if `collect` is less than 1.8 times
as fast as `two stages`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.choices import check_engine, default_engine, resolve_head, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.servers import Server, ServerError, check_worker
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.learning.data.rows import read_rows
from eagle_plugin.learning.data.store.feature_store import FeatureStore

WANTED = 1.8  # of `collect` over `two stages`
LARGEST = 2**-6  # difference of a state, of the larger of 1 and its value: bfloat16 has 8 bits
WRITER = "eagle_plugin.learning.data.collecting.writer"


@dataclass
class Way:
    """What one way took."""

    tokens: int = 0  # of all documents
    response_tokens: int = 0
    server_cpu_s: float = 0.0
    command_cpu_s: float = 0.0  # less what the commands take with nothing to do
    fixed_cpu_s: float = 0.0  # what they take with nothing to do
    wall_s: float = 0.0

    @property
    def tokens_per_cpu_s(self) -> float:
        """Without the fixed part."""
        return self.tokens / (self.server_cpu_s + self.command_cpu_s)


def cpu_of(server: Server) -> Callable[[], float]:
    """The processor time of a server's processes and of the writer that it has started."""
    members = [psutil.Process(pid) for pid in server.members()]
    writers = [child for one in members for child in one.children() if WRITER in " ".join(child.cmdline())]
    found = [*members, *{child.pid: child for child in writers if child not in members}.values()]
    return lambda: sum(one.cpu_times().user + one.cpu_times().system for one in found)


def run(way: Way, arguments: Sequence[str], log: Path, server: Server | None = None) -> None:
    """Run one `eagle-plugin data` command, then once more with nothing to do.

    Raises:
        ServerError: it failed.
    """
    clock = (lambda: 0.0) if server is None else cpu_of(server)
    server_before, began = clock(), time.monotonic()
    first = _cpu_of_command(arguments, log)
    if server is not None:
        time.sleep(2.0)  # what the server still has to do, such as writing its counts
    way.server_cpu_s += clock() - server_before
    way.wall_s += time.monotonic() - began
    fixed = _cpu_of_command(arguments, log)
    way.command_cpu_s += max(0.0, first - fixed)
    way.fixed_cpu_s += fixed


def _cpu_of_command(arguments: Sequence[str], log: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-m", "eagle_plugin.cli", "data", *arguments], stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise ServerError(f"`eagle-plugin data {arguments[0]}` failed with exit code {done.returncode}; see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(found: FeatureStore, wanted: FeatureStore) -> dict[str, Any]:
    """Documents and tokens of two stores, and their largest difference; of an answer's last token nobody reads any."""
    others = {entry.id: entry for entry in wanted.entries}
    worst, same = 0.0, found.entries != [] and {entry.id for entry in found.entries} == others.keys()
    for entry in found.entries:
        if entry.id not in others:
            continue
        one, other = found.read(entry), wanted.read(others[entry.id])
        same &= one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()
        pairs = [(one.last, other.last)] + ([(one.aux, other.aux)] if one.aux is not None else [])
        for a, b in pairs:
            if b is not None and a.shape == b.shape:
                a, b = a[:-1].float(), b[:-1].float()
                worst = max(worst, float(((a - b).abs() / b.abs().clamp(min=1)).max()))
    return {"documents": len(found.entries), "same_tokens": bool(same), "largest_difference": worst}


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All ways; the numbers for collect.json."""
    target = resolve_target(options.target, console)
    folder = options.out / "collect"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*/*"):
        old.unlink()
    prompts, log = folder / "prompts.jsonl", folder / "commands.log"
    _cpu_of_command(["builtin", "--limit", str(options.prompts), "--out", str(prompts)], log)
    spec = ServerSpec(
        target=target,
        mode="plain",
        head=resolve_head(options.head, target),
        engine=options.engine,
        dtype="float32",
        threads=options.threads,
        shape=ENGINES[options.engine].plugin_shape(resolve_head(options.head, target)),
    ).for_concurrency(options.concurrency)
    ways = {name: Way() for name in ("two stages", "collect", "engine features")}
    stores = {name: folder / name.replace(" ", "-") for name in ways}
    asked = ["--max-tokens", str(options.max_tokens), "--temperature", "0", "--concurrency", str(options.concurrency)]
    rows = {name: folder / f"{name.replace(' ', '-')}.jsonl" for name in ways}
    for path in (*rows.values(), *(path.with_suffix(".skipped.jsonl") for path in rows.values())):
        path.unlink(missing_ok=True)
    named = ["--target", str(target)]
    with _serving(replace(spec, name="plain"), folder, console) as server:
        console.print("two stages: generate")
        at = ["--endpoint", server.url, *asked]
        run(ways["two stages"], ["generate", str(prompts), "--out", str(rows["two stages"]), *at], log, server)
    ways["engine features"] = replace(ways["two stages"])
    console.print("two stages: features")
    by_transformers = ["--store", str(stores["two stages"]), "--dtype", "float32", "--device", "cpu"]
    run(ways["two stages"], ["features", str(rows["two stages"]), *named, *by_transformers], log)
    for name in ("collect", "engine features"):
        store = stores[name].resolve()
        environment = {"EAGLE_FEATURES": str(store)}
        plugin = replace(spec, mode="plugin", environment=environment, name=name.replace(" ", "-"))
        with _serving(plugin, folder, console) as server:
            console.print(name)
            to = [*named, "--store", str(store), "--endpoint", server.url]
            if name == "collect":
                command = ["collect", str(prompts), "--out", str(rows[name]), *to, *asked]
            else:
                command = ["features", str(rows["two stages"]), *to, "--concurrency", str(options.concurrency)]
            run(ways[name], command, log, server)
    return report(ways, stores, rows["two stages"], rows["collect"], options)


@contextmanager
def _serving(spec: ServerSpec, folder: Path, console: Console) -> Iterator[Server]:
    console.print(f"starting a server: {spec.label}")
    with Server.of(spec, folder / "logs") as server:
        server.wait_ready()
        check_worker(server, spec.mode)
        yield server


def report(
    ways: Mapping[str, Way], stores: Mapping[str, Path], wanted: Path, found: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """The numbers of all ways and the comparison of texts and states."""
    opened = {name: FeatureStore(path) for name, path in stores.items()}
    reference = opened["two stages"]
    results: dict[str, Any] = {}
    for name, way in ways.items():
        entries = opened[name].entries
        way.tokens, way.response_tokens = sum(e.length for e in entries), sum(e.n_response for e in entries)
        size = sum(path.stat().st_size for path in stores[name].glob("shard-*"))
        results[name] = {
            **vars(way),
            "tokens_per_cpu_s": round(way.tokens_per_cpu_s, 2),
            "bytes_per_token": round(size / max(1, way.tokens), 1),
            **compare(opened[name], reference),
        }
    responses = {row.id: row.response_ids for row in read_rows(wanted)}
    same_responses = responses == {row.id: row.response_ids for row in read_rows(found)}
    ratio = ways["collect"].tokens_per_cpu_s / ways["two stages"].tokens_per_cpu_s
    equal = same_responses and all(
        one["same_tokens"] and one["largest_difference"] <= LARGEST for one in results.values()
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine().model_dump(mode="json"),
        "options": {key: str(value) for key, value in vars(options).items()},
        "ways": results,
        "same_responses": same_responses,
        "texts_and_states_equal": equal,
        "collect_over_two_stages": round(ratio, 3),
        "wanted": WANTED,
        "good": equal and ratio >= WANTED,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(prog="benchmarks/collect.py", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="folder or name (%(default)s)")
    parser.add_argument("--head", default="smollm2-135m-instruct-eagle3", help="of the server with the plugin")
    parser.add_argument("--engine", choices=sorted(ENGINES), default=default_engine(), help="(%(default)s)")
    parser.add_argument("--prompts", type=positive_number, default=48, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=positive_number, default=96, help="per answer (%(default)s)")
    parser.add_argument("--concurrency", type=positive_number, default=16, help="requests at a time (%(default)s)")
    parser.add_argument("--threads", type=positive_number, default=1, help="of a server (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="(%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options, console = parse(argv), Console(stderr=True)

    def work() -> int:
        check_engine(options.engine)
        found = measure(options, console)
        write_output(options.out / "collect.json", [json.dumps(found, indent=1), "\n"])
        table = Table("way", "tokens", "tokens per CPU-second", "bytes per token", "CPU-s of servers, commands")
        for name, way in found["ways"].items():
            cpu = f"{way['server_cpu_s']:.1f}, {way['command_cpu_s']:.1f} (and {way['fixed_cpu_s']:.1f} fixed)"
            table.add_row(name, f"{way['tokens']:,}", f"{way['tokens_per_cpu_s']}", f"{way['bytes_per_token']}", cpu)
        Console().print(table)
        Console().print(
            f"collect / two stages: {found['collect_over_two_stages']} (wanted {WANTED}); texts and states equal: "
            f"{found['texts_and_states_equal']}"
        )
        return 0 if found["good"] else 1

    return exit_status("collect", console, work)


if __name__ == "__main__":
    sys.exit(main())
