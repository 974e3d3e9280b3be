"""Start several servers together and show how far they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.markup import escape

from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server, check_worker, child_environment
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.turns import Name, warm_up


@contextlib.contextmanager
def launched(specs: Mapping[Name, ServerSpec], logs: Path) -> Iterator[dict[Name, Server]]:
    """Launch all servers without waiting for them; at the end all are stopped."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Server.of(spec, logs)) for name, spec in specs.items()}


def wait_all(servers: Mapping[Name, Server], specs: Mapping[Name, ServerSpec], steps: Steps) -> None:
    """Wait until all launched servers are ready, check which worker serves, and leave them paused.

    Raises ServerError if one of them does not start or uses another worker than its spec asks for.
    """
    if not servers:
        return
    few = " and ".join(server.label for server in servers.values())
    with steps.step(f"starting {few if len(servers) <= 3 else f'{len(servers)} servers'}") as step:
        for name, server in servers.items():
            server.wait_ready(progress=step.update)
            line = check_worker(server, specs[name].mode)
            server.pause()
            steps.log(f"[green]{server.label} is ready[/]  [dim]{escape(line)}[/]")


@contextlib.contextmanager
def serving(
    specs: Mapping[Name, ServerSpec], logs: Path, steps: Steps, others: int = 0
) -> Iterator[dict[Name, Server]]:
    """The servers are ready and paused. One whose policy measures costs as it starts comes alone, after the others.

    On a GPU each starts alone: an engine sees how much memory is free, before and after it loads its target.

    others: servers that share the GPU with these at some time.
    """
    specs = {name: spec.beside(len(specs) - 1 + others) for name, spec in specs.items()}
    for spec in specs.values():  # what cannot be served is refused before the first of them loads its target
        child_environment(spec, os.environ)
    together = {name: spec for name, spec in specs.items() if spec.device == "cpu" and not _measures_costs(spec)}
    alone = sorted((name for name in specs if name not in together), key=lambda name: _measures_costs(specs[name]))
    with contextlib.ExitStack() as stack:
        servers: dict[Name, Server] = {}
        for part in (together, *({name: specs[name]} for name in alone)):
            started = stack.enter_context(launched(part, logs))
            wait_all(started, part, steps)
            servers |= started
        yield {name: servers[name] for name in specs}


def _measures_costs(spec: ServerSpec) -> bool:
    return spec.mode == "plugin" and spec.environment.get("EAGLE_POLICY", "auto") == "auto"


def warm_up_all(servers: Mapping[Name, Server], questions: Sequence[Question], steps: Steps) -> None:
    """Warm up one paused server after the other."""
    with steps.step("warming up") as step:
        for server in servers.values():
            step.update(server.label)
            server.resume()
            warm_up(server, questions)
            server.pause()
