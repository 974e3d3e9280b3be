"""One progress bar on stderr for a command that prepares something before it begins; lines where it is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eagle_plugin.common.percent_lines import PercentLines


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function of what is being done and the share that is done; the bar appears with its first call."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield PercentLines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=1.0)

    def report(what: str, share: float) -> None:
        bar.start()
        bar.update(task, description=what, completed=share)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
