"""How a command of the benchmark ends: its exit status, and one message after a failure."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.load import LoadError
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.common.command_end import sigterm_as_exit
from eagle_plugin.common.errors import UserError


def exit_status(name: str, console: Console, command: Callable[[], int]) -> int:
    """Run a command that starts servers, and return its exit status: 1 after a failure, 130 after Ctrl-C.

    A failure (ServerError, LoadError, UserError, ValueError) is printed as one message. SIGTERM leaves by SystemExit,
    so that the servers are stopped.
    """
    with sigterm_as_exit():
        try:
            return command()
        except (ServerError, LoadError, UserError, ValueError) as error:
            console.print(f"[bold red]{name} failed:[/] {escape(str(error))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("\nstopped; all servers are down")
            return 130
