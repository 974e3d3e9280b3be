"""The logs of a run: two CSV files, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import replace_file

DEPTH_COLUMNS = ("loss", "accuracy", "acceptance")
COLUMNS = ("update", "epoch", "tokens", "seconds", "phase", "loss")
TRAIN_COLUMNS = (*COLUMNS, "lr", "gradient_norm", "tokens_per_s")


def depth_columns(depths: int) -> list[str]:
    """`acceptance_1` is the first draft token's."""
    return [f"{name}_{k}" for name in DEPTH_COLUMNS for k in range(1, depths + 1)]


class CsvLog:
    """A CSV file that a resumed run continues where its checkpoint was made."""

    def __init__(self, path: Path, columns: Sequence[str], update: int) -> None:
        """Open `path`; rows after `update`, and one that a killed run left unfinished, are dropped."""
        self._columns = list(columns)
        kept = [row for row in read_log(path) if row["update"] <= update] if path.is_file() else []
        self._update = kept[-1]["update"] if kept else -1
        with replace_file(path, flush=False) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            file.write(self._format(dict(zip(columns, columns, strict=True))))
            file.writelines(self._format(row) for row in kept)
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, unless its update is in the log; a missing column stays empty."""
        if row["update"] <= self._update:
            return
        self._update = row["update"]
        self._file.write(self._format(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _format(self, row: dict[str, Any]) -> str:
        values = [row.get(column, "") for column in self._columns]
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([_shorten(value) for value in values])
        return line.getvalue()


def _shorten(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    return value


def read_log(path: Path) -> list[dict[str, float]]:
    """The complete rows of a log; empty cells are left out."""
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [
        {name: float(value) for name, value in row.items() if value} for row in csv.DictReader(io.StringIO(complete))
    ]


class Logs:
    """`train.csv` and `val.csv` in a folder, and the same numbers for TensorBoard."""

    def __init__(self, folder: Path, depths: int, update: int) -> None:
        self._train = CsvLog(folder / "train.csv", [*TRAIN_COLUMNS, *depth_columns(depths)], update)
        self._val = CsvLog(folder / "val.csv", [*COLUMNS, *depth_columns(depths)], update)
        self._board = _open_board(folder / "tensorboard", update)

    def write(self, split: str, row: dict[str, Any]) -> None:
        """Log one row of split train or val."""
        (self._train if split == "train" else self._val).write(row)
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._board.add_scalar(f"{split}/{name}", value, row["update"])

    def close(self) -> None:
        self._train.close()
        self._val.close()
        if self._board is not None:
            self._board.close()


def _open_board(folder: Path, update: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=update + 1)
