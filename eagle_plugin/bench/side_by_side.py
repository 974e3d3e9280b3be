"""The same question to two servers, with their answers in two columns.

The servers answer one after the other and the other one is paused: the speed in a column is that of a server that ran
alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eagle_plugin.bench.load import Sampling, accept_length, ask_all
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.report import ShownAnswer, ShownQuestion
from eagle_plugin.bench.servers import Server

LOG_WIDTH = 100  # columns of characters, without a terminal


@dataclass
class Column:
    """One server's answer to the question, as much of it as has arrived."""

    title: str
    pieces: list[tuple[float, str]] = field(default_factory=list)  # seconds after the request, and what arrived
    speed: str = "waiting"
    asked: float = 0.0  # on the clock of time.perf_counter

    def ask(self, server: Server, question: Question, max_tokens: int) -> None:
        """Let `server` answer alone; the column is filled while the answer arrives. Raises LoadError."""
        server.resume()
        self.asked = time.perf_counter()
        try:
            sampling = Sampling(max_tokens=max_tokens)
            (answer,) = ask_all(
                server.endpoint, [question], sampling, on_text=self._add_text, on_tokens=self._set_tokens
            )
        finally:
            server.pause()
        self.speed = f"{answer.completion_tokens / answer.total_s:.1f} tokens/s"
        if length := accept_length([answer]):
            self.speed += f", accept length {length:.2f}"

    @property
    def text(self) -> str:
        """All that has arrived."""
        return "".join(piece for _, piece in self.pieces)

    def _add_text(self, piece: str) -> None:
        self.pieces.append((round(time.perf_counter() - self.asked, 3), piece))

    def _set_tokens(self, tokens: int) -> None:
        self.speed = f"{tokens / (time.perf_counter() - self.asked):.1f} tokens/s"

    def panel(self) -> Panel:
        """The column as it is drawn."""
        return Panel(Text(self.text), title=escape(self.title), subtitle=f"[bold]{escape(self.speed)}")


def side_by_side(question: Question, columns: Sequence[Column]) -> Table:
    """The question above one panel per column."""
    table = Table.grid(expand=True, padding=(0, 1))
    table.title, table.title_style, table.title_justify = Text(question.prompt), "bold cyan", "left"
    for _ in columns:
        table.add_column(ratio=1)
    table.add_row(*(column.panel() for column in columns))
    return table


def show_side_by_side(
    servers: Mapping[str, Server], questions: Sequence[Question], max_tokens: int, steps: Steps
) -> list[ShownQuestion]:
    """Ask every server every question; the keys of `servers` are the titles. All of them are paused before and after.

    On a terminal the columns fill while the answers arrive; elsewhere each finished pair of columns is printed. Returns
    the questions whose answers all have text.
    """
    console, shown = steps.console, []
    steps.log("first answers, one server at a time: the other one is paused")
    for question in questions:
        columns = [Column(name) for name in servers]
        if console.is_terminal:
            with Live(get_renderable=lambda q=question, c=columns: side_by_side(q, c), console=console):  # type: ignore[misc]
                for column in columns:
                    column.ask(servers[column.title], question, max_tokens)
        else:
            with steps.step(f"question {question.id!r}") as step:
                for column in columns:
                    step.update(column.title)
                    column.ask(servers[column.title], question, max_tokens)
            console.print(side_by_side(question, columns), width=LOG_WIDTH)
        if all(column.pieces for column in columns):
            answers = [ShownAnswer(title=one.title, speed=one.speed, pieces=one.pieces) for one in columns]
            shown.append(ShownQuestion(prompt=question.prompt, answers=answers))
    return shown
