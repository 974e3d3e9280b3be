"""`eagle-plugin serve`: one server, with the plugin or plain, in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.choices import (
    ENGINE_FLAGS,
    TARGET,
    add_model_options,
    check_engine,
    chosen_device,
    parse_shape,
    parse_with_engine_flags,
    resolve_head,
    resolve_target,
)
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.outcome import failure_since
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.public_heads import check_public_head, public_head
from eagle_plugin.bench.servers import Server, ServerError, check_worker
from eagle_plugin.bench.spec import CACHE_TOKENS, CONTEXT, SPARE_TOKENS, ServerSpec
from eagle_plugin.common.command_end import INTERRUPTED, sigterm_as_exit
from eagle_plugin.common.command_line import Parser, port_number, positive_number
from eagle_plugin.common.errors import UserError
from eagle_plugin.models import PUBLIC

KEYS = ("VLLM_API_KEY",)  # of the user's shell: this server answers the user, and those of benchmarks only us
DESCRIPTION = """\
Start a stock engine's OpenAI server on 127.0.0.1, with the plugin or (--plain) without drafts, and keep it running
until Ctrl-C. Without options it serves a small model with the draft head that comes with eagle-plugin. With the name of
a public model it fetches the target and a head for it from the Hugging Face hub.
"""
EXAMPLES = f"""\
examples:
  eagle-plugin serve                                     prints the address and a curl command
  eagle-plugin serve gpt-oss-20b                         a public model and its head (eagle-plugin models list)
  eagle-plugin serve --target TARGET --head HEAD -- --chunked-prefill-size 2048
  eagle-plugin serve --plain --target TARGET --port 30000 --concurrency 64       a target for `data generate`

{ENGINE_FLAGS}
A server of your own needs none of this: the plugin serves whatever is started with the engine's speculative flags
(README.md).
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; what follows `--` is passed to the engine unchanged."""
    parser = Parser(prog="eagle-plugin serve", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("model", nargs="?", metavar="NAME", help="a name of `eagle-plugin models list`")
    add_model_options(parser)
    parser.add_argument("--plain", action="store_true", help="the engine alone, without drafts: for `data generate`")
    parser.add_argument("--port", type=port_number, default=None, help="default: a free port")
    parser.add_argument("--shape", type=parse_shape, metavar="S/K/N", help="steps/topk/nodes of the draft tree")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: bfloat16")
    parser.add_argument("--threads", type=int, default=None, help="OpenMP threads (default: the engine's choice)")
    parser.add_argument(
        "--concurrency", type=int, default=8, help="requests served at a time; others wait (default: 8)"
    )
    parser.add_argument(
        "--context", type=positive_number, default=CONTEXT, metavar="N",
        help=f"tokens of a request, prompt and answer together (default: {CONTEXT}, on every device)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of logs/ (default: out)")
    options = parse_with_engine_flags(parser, argv)
    if options.model is not None:
        if options.target != TARGET:
            parser.error(f"NAME is {options.model} and --target {options.target}; leave one of them out")
        options.target = options.model
    for flag in ("head", "shape"):
        if options.plain and getattr(options, flag) is not None:
            parser.error(f"--plain serves without drafts and has no --{flag}; leave one of them out")
    if options.concurrency < 1:
        parser.error(f"--concurrency is {options.concurrency}, wanted at least 1")
    return options


def server_spec(options: argparse.Namespace, target: Path) -> ServerSpec:
    """The server that the options ask for; ServerError if there is no head for this target."""
    head, device = None if options.plain else _head(options, target), chosen_device(options.device)
    return (
        ServerSpec(
            target=target,
            mode="plain" if options.plain else "plugin",
            head=head,
            engine=options.engine,
            device=device,
            shape=options.shape or ENGINES[options.engine].plugin_shape(head, device, target),
            dtype=options.dtype,
            threads=options.threads,
            context_length=options.context,
            max_total_tokens=max(CACHE_TOKENS, options.context + SPARE_TOKENS),
            extra_flags=options.engine_flags,
            environment={name: os.environ[name] for name in KEYS if name in os.environ},
        )
        .for_concurrency(options.concurrency)
        .alone()
    )


def _head(options: argparse.Namespace, target: Path) -> Path:
    """The head that the options name, or, of a public model, its own in the form that the engine reads."""
    if options.head is None and options.target in PUBLIC:
        return public_head(PUBLIC[options.target], options.engine, target)
    return resolve_head(options.head, target, options.engine)


def curl_example(url: str) -> str:
    """A command line that asks the server one question and streams the answer."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
        "stream": True,
    }
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C (returns 0; 130 before it serves) or until the server ends by itself (returns 1).

    2 if what was asked is refused before the server is started. The last log lines of a server that ends by itself are
    printed.
    """
    options = parse(argv)
    stopped, before = INTERRUPTED, Server.started
    console = Console()
    with sigterm_as_exit():
        try:
            check_engine(options.engine, options.device, not options.plain)
            if options.head is None and options.target in PUBLIC and not options.plain:
                check_public_head(PUBLIC[options.target], options.engine)
            spec = server_spec(options, resolve_target(options.target, console))
            with Server.of(spec, options.out / "logs", options.port) as server:
                with Steps(console).step("starting") as step:
                    server.wait_ready(progress=step.update)
                line = check_worker(server, spec.mode) or "plain decoding: the engine alone, without drafts"
                console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
                console.print(
                    f"[bold green]serving[/] {spec.target.name} at {server.url}/v1   (log: {server.log})",
                    soft_wrap=True,
                )
                console.print(curl_example(server.url), markup=False, highlight=False, soft_wrap=True)
                console.print("Ctrl-C stops it")
                stopped = 0
                while True:
                    time.sleep(1.0)
                    server.check_alive("while it was serving")
        except (ServerError, UserError, ValueError) as error:
            console.print(f"[bold red]serve failed:[/] {escape(str(error))}", soft_wrap=True)
            return failure_since(before)
        except KeyboardInterrupt:
            console.print("\nstopped")
            return stopped


if __name__ == "__main__":
    raise SystemExit(main())
