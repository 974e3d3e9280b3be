"""Prepares a measurement: options, sizes of the servers, and a look at the machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_plugin.bench.choices import add_model_options, chosen_device, resolve_head
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import engine_version
from eagle_plugin.bench.machine import busy_percent
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import SPARE_TOKENS, EngineName, ServerSpec
from eagle_plugin.common.devices import usable_cores

CONTEXT_LENGTH = 4096  # tokens; long prompts have about 2,100
BUSY_LIMIT = 10.0  # percent of all cores


def at_least(least: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """An argument's type: a number that is not below `least`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} was given, wanted a number of at least {least:g}")
        return value

    return read


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that starts servers of several kinds."""
    add_model_options(parser)
    parser.add_argument("--threads", type=at_least(1), help="OpenMP threads of every server")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the report, the picture and logs/ (default: out)"
    )
    parser.add_argument(
        "--async",
        action="store_true",
        dest="is_async",
        help="the plugin in vLLM with asynchronous scheduling, vLLM's default on a GPU; on a CPU stock vLLM has none",
    )


def base_spec(options: argparse.Namespace, target: Path, clients: int, cache_tokens: int) -> ServerSpec:
    """What all servers have in common, written as the plain one: sizes for so many clients, and the others' head."""
    if options.is_async and options.engine != "vllm":
        raise ValueError(f"--async is of vLLM, found --engine {options.engine}: add --engine vllm, or leave it out")
    plain = plain_spec(options.engine, target, options.device, options.threads, clients, cache_tokens)
    head = resolve_head(options.head, target, options.engine)
    return replace(plain, head=head, is_async=options.is_async, extra_flags=options.engine_flags)


def plain_spec(
    engine: EngineName,
    target: Path,
    device: str | None,
    threads: int | None,
    clients: int,
    cache_tokens: int,
    context: int = CONTEXT_LENGTH,
) -> ServerSpec:
    """A plain server with sizes for so many clients; device and threads are chosen where they are None."""
    return ServerSpec(
        target=target,
        mode="plain",
        engine=engine,
        device=chosen_device(device),
        threads=threads or ENGINES[engine].default_threads(usable_cores()),
        context_length=context,
        max_total_tokens=max(cache_tokens, context) + SPARE_TOKENS,
        max_running_requests=clients,
    )


def version_of(server: Server) -> str:
    """The version that a paused server reports."""
    server.resume()
    version = engine_version(server.endpoint)
    server.pause()
    return version


def check_busy(steps: Steps) -> float:
    """How busy the machine is while all servers are paused, in percent, with a warning if that is too much."""
    busy = busy_percent()
    if busy > BUSY_LIMIT:
        steps.log(f"[bold yellow]other processes use {busy:.0f} % of this machine: the results will be off[/]")
    return busy
