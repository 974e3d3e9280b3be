"""The learning curve of a run as a picture and as JSON, from its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import replace_file, write_output
from eagle_plugin.learning.train.logs import DEPTH_COLUMNS, read_log

DEPTHS = range(1, 17)
MEANINGS = {
    "accuracy": "draft is the target's most probable token",
    "acceptance": "accepted, given all before",
}


def write_curve(logs: Path) -> Path | None:
    """Write logs/curve.json: one entry per evaluation on held-out documents; returns the file, None without any.

    An entry has update, tokens, seconds and the loss that is minimised, and as lists by depth: `loss`, `accuracy` (how
    often the most probable draft token is the target's) and `acceptance` (how often it is the next token of the data,
    given that all drafts before it were).
    """
    rows = read_log(logs / "val.csv")
    if not rows:
        return None
    entries = [
        {key: row[key] for key in ("update", "tokens", "seconds")}
        | {"total_loss": row.get("loss")}
        | {name: [row[key] for k in DEPTHS if (key := f"{name}_{k}") in row] for name in DEPTH_COLUMNS}
        for row in rows
    ]
    write_output(logs / "curve.json", [json.dumps({"held_out": entries}, indent=1), "\n"])
    return logs / "curve.json"


def draw_curve(logs: Path, title: str) -> list[Path]:
    """Draw loss, accuracy and acceptance against tokens into logs/curve.{png,svg}; returns the files written.

    Nothing is drawn without rows to draw.
    """
    train, val = read_log(logs / "train.csv"), read_log(logs / "val.csv")
    if not train and not val:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, MaxNLocator

    settings: Any = {"svg.hashsalt": "eagle-plugin", "svg.fonttype": "none"}  # the same numbers give the same bytes
    with matplotlib.rc_context(settings):
        figure, (losses, *by_depth) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
        for rows, label, style in ((train, "training", "-"), (val, "held out", "o-")):
            points = [(row["tokens"], row["loss"]) for row in rows if "loss" in row]
            if points:
                losses.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
        losses.set(xlabel="tokens", ylabel="loss", title="loss")
        if losses.lines:
            losses.legend()
        rows = [row for row in val if "acceptance_1" in row]
        held_out = bool(rows)
        rows = rows or train
        where = "held out" if held_out else "training"
        for axes, (name, meaning) in zip(by_depth, MEANINGS.items(), strict=True):
            for k in DEPTHS:
                points = [(row["tokens"], row[key]) for row in rows if (key := f"{name}_{k}") in row]
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", label=f"depth {k}", markersize=3, linewidth=1)
            axes.set(xlabel="tokens", ylabel=meaning, title=f"{name}, {where}", ylim=(0, 1))
            if axes.lines:
                axes.legend()
        for axes in (losses, *by_depth):
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.suptitle(title)
        files = [logs / "curve.png", logs / "curve.svg"]
        for path in files:
            dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
            with replace_file(path, flush=False) as partial:
                figure.savefig(partial, dpi=120, format=path.suffix[1:], **dated)
        pyplot.close(figure)
    return files
