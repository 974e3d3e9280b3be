"""How a command of the benchmark ends: its exit status, and one message after a failure."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.load import LoadError
from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.common.command_end import INTERRUPTED, REFUSED, sigterm_as_exit
from eagle_plugin.common.errors import UserError


def exit_status(name: str, console: Console, command: Callable[[], int]) -> int:
    """Run a command that starts servers, and return its exit status: 130 after Ctrl-C, 1 after a failure, or 2 if what
    was asked is refused, which is a failure before the first server is started.

    A failure (ServerError, LoadError, UserError, ValueError) is printed as one message. SIGTERM leaves by SystemExit,
    so that the servers are stopped.
    """
    before = Server.started
    with sigterm_as_exit():
        try:
            return command()
        except (ServerError, LoadError, UserError, ValueError) as error:
            console.print(f"[bold red]{name} failed:[/] {escape(str(error))}", soft_wrap=True)
            return failure_since(before)
        except KeyboardInterrupt:
            # A second Ctrl-C interrupts what stops them; then they are stopped as the process ends.
            left = ", ".join(sorted(server.label for server in Server.running))
            console.print(f"\nstopped; {f'ending {left}' if left else 'all servers are down'}")
            return INTERRUPTED


def failure_since(before: int) -> int:
    """The exit status of a failure: 2 where no server was started since `Server.started` was `before`, else 1."""
    return 1 if Server.started > before else REFUSED
