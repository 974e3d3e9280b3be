"""One progress bar on stderr for a command that prepares something before it begins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function of what is being done and the share that is done; the bar appears with its first call."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("", total=1.0)

    def report(what: str, share: float) -> None:
        bar.start()
        bar.update(task, description=what, completed=share)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
