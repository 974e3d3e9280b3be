"""Starts the server of the traffic and of the exchange: the plugin's, with a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import Server, check_worker
from eagle_plugin.bench.spec import EngineName, ServerSpec
from eagle_plugin.common.devices import default_device


@contextmanager
def plugin_server(
    engine: EngineName, target: Path, head: Path, requests: int, environment: Mapping[str, str], name: str,
    folder: Path, steps: Steps, is_exact: bool = False,
) -> Iterator[Server]:  # fmt: skip
    """Serve within the block; the log is in `folder`/logs.

    requests: so many at a time. is_exact: in float32, not in bfloat16.

    Raises:
        ServerError: it does not start; one sentence for the user.
    """
    device = default_device()
    spec = (
        ServerSpec(
            target=target,
            mode="plugin",
            head=head,
            engine=engine,
            device=device,
            shape=ENGINES[engine].plugin_shape(head, device, target),
            environment=environment,
            name=name,
        )
        .for_concurrency(requests)
        .alone()
    )
    with Server.of(replace(spec, dtype="float32") if is_exact else spec, folder / "logs") as server:
        with steps.step("starting the server") as step:
            server.wait_ready(progress=step.update)
            check_worker(server, spec.mode)
        yield server
