"""What a generation has put on disk so far: the rows, and the prompts that gave none."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path

from eagle_plugin.data.rows import DataError, TokenRow, format_row, read_rows


class Journal:
    """Rows appended to `out`, skipped prompts to `<out>.skipped.jsonl` beside it; made again, it goes on where it was.

    A conversation's rows are appended in one piece when it is over, so that a kill loses only what is in flight.

    Raises:
        DataError: another process writes the same file, or it holds something else than rows.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.skipped = out, out.with_suffix(".skipped.jsonl")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._rows = out.open("a+b")
            self._skips = self.skipped.open("a+b")
        except OSError as error:
            raise DataError(f"cannot write {out} ({error.strerror}); name another file with --out") from error
        try:
            fcntl.flock(self._rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._rows.close()
            self._skips.close()
            raise DataError(f"another process is writing {out}; wait for it or name another file with --out") from error
        _cut_unfinished(self._rows.name)
        _cut_unfinished(self._skips.name)
        self.done = {conversation(row.id) for row in read_rows(out)}  # ids of prompts
        try:
            self.done.update(json.loads(line)["prompt"] for line in self.skipped.read_bytes().splitlines())
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{self.skipped} has a line that no generation wrote ({error}); correct or remove it"
            ) from error
        self.resumed = len(self.done)

    def keep(self, rows: Sequence[TokenRow]) -> None:
        """Append the rows of one whole conversation."""
        # The first turn goes last: a file that ends inside a conversation is told by an id that does not end in #0.
        self._rows.write("".join(map(format_row, reversed(rows))).encode())
        self._rows.flush()

    def skip(self, prompt_id: str, turn: int, reason: str) -> None:
        """Note why a turn gave no row; the prompt is not asked again."""
        self._skips.write((json.dumps({"prompt": prompt_id, "turn": turn, "reason": reason}) + "\n").encode())
        self._skips.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._rows, self._skips):
            os.fsync(file.fileno())
            file.close()


def turn_id(prompt_id: str, turn: int) -> str:
    """The id of a prompt's turn-th answer."""
    return f"{prompt_id}#{turn}"


def conversation(row_id: str) -> str:
    """The id of the prompt that a row came from."""
    prompt, mark, turn = row_id.rpartition("#")
    return prompt if mark and turn.isdigit() else row_id


def _cut_unfinished(path: str) -> None:
    """Cut off a torn last line, and the later turns of a conversation whose first turn is not there."""
    end = good = 0
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            _, mark, turn = _id_of(line).rpartition("#")
            if not mark or not turn.isdigit() or turn == "0":
                good = end
        file.truncate(good)


def _id_of(line: bytes) -> str:
    try:
        return str(json.loads(line)["id"])
    except (ValueError, LookupError, TypeError):
        return ""
