"""The output files of a generation run: the rows, and the prompts that gave no row."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.json_files import kept_object
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row, prompt_id_of, read_rows

SPACE = "free some space and run the same command again, what was written before is kept"


class Journal:
    """Appends rows to `out` and skipped prompts to `<out>.skipped.jsonl`; files of an earlier run are continued.

    `<out>.model.json` has the name of the model that the servers gave.

    The rows of a conversation are appended in one piece when it has ended: after a kill, only conversations that were
    running are lost.

    Attributes:
        done: ids of the prompts that have rows or were skipped.
        resumed: how many of those earlier runs did.

    Raises:
        DataError: another process writes the same file, or one of the files has other lines.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.skipped, self._model_file = output_files(out)
        self._model: str | None = None  # to be noted with the first rows
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._rows = out.open("a+b")
            self._skips = self.skipped.open("a+b")
        except OSError as error:
            raise DataError(f"cannot write {out} ({error.strerror or error}); name another file with --out") from error
        try:
            fcntl.flock(self._rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._rows.close()
            self._skips.close()
            raise DataError(f"another process is writing {out}; wait for it or name another file with --out") from error
        _cut_unfinished(self._rows.name)
        _cut_unfinished(self._skips.name)
        self.done = {prompt_id_of(row.id) for row in read_rows(out)}
        try:
            self.done.update(json.loads(line)["prompt"] for line in self.skipped.read_bytes().splitlines())
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{self.skipped} has a line that `data generate` did not write ({error}); correct or remove it"
            ) from error
        self.resumed = len(self.done)

    def continue_with(self, model: str) -> None:
        """Note with the next rows the name of the model that answers from now on.

        Raises:
            DataError: the rows of earlier runs are of another one.
        """
        before = kept_object(self._model_file).get("model")
        if self.done and before is not None and before != model:
            raise DataError(
                f"{self.out} has answers of the model {before}, and the servers have {model}; name another file with "
                f"--out, or remove {self._model_file} if it is the same target under another name"
            )
        self._model = None if before == model else model

    def append(self, rows: Sequence[TokenRow]) -> None:
        """Append the rows of one complete conversation."""
        # In reverse order: if the file was cut inside a conversation, its last id does not end in #0.
        self._write(self._rows, "".join(map(format_row, reversed(rows))))
        if self._model is not None:
            write_output(self._model_file, [json.dumps({"model": self._model}), "\n"], SPACE)
            self._model = None

    def skip(self, prompt_id: str, turn: int, reason: str) -> None:
        """Record why a turn gave no row; later runs do not ask this prompt again."""
        self._write(self._skips, json.dumps({"prompt": prompt_id, "turn": turn, "reason": reason}) + "\n")

    def _write(self, file: IO[bytes], text: str) -> None:
        try:
            file.write(text.encode())
            file.flush()
        except OSError as error:
            raise DataError(f"cannot write {file.name} ({error.strerror}); {SPACE}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error of `_write` a file still holds what it could not write, and would raise again.
        with contextlib.suppress(OSError) if isinstance(error[1], DataError) else contextlib.nullcontext():
            for file in (self._rows, self._skips):
                os.fsync(file.fileno())
                file.close()


def output_files(out: Path) -> tuple[Path, Path, Path]:
    """What a journal writes: the rows, the prompts that gave none, and the name of the model."""
    return out, out.with_suffix(".skipped.jsonl"), out.with_suffix(".model.json")


def _cut_unfinished(path: str) -> None:
    """Remove an incomplete last line, and then the turns of a last conversation whose first turn is missing."""
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
