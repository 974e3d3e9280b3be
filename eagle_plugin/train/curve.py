"""The learning curve of a run as a picture, drawn from its logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_plugin.atomic_io import replace_file
from eagle_plugin.train.logs import read_log


def draw_curve(logs: Path, title: str) -> list[Path]:
    """Draw loss and acceptance by depth against tokens into logs/curve.{png,svg}; returns the files written.

    Nothing is drawn without rows to draw.
    """
    train, val = read_log(logs / "train.csv"), read_log(logs / "val.csv")
    if not train and not val:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "eagle-plugin", "svg.fonttype": "none"}  # the same numbers give the same bytes
    with matplotlib.rc_context(settings):
        figure, (losses, acceptance) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
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
        for k in range(1, 17):
            points = [(row["tokens"], row[name]) for row in rows if (name := f"acceptance_{k}") in row]
            if points:
                acceptance.plot(*zip(*points, strict=True), "o-", label=f"depth {k}", markersize=3, linewidth=1)
        where = "held out" if held_out else "training"
        acceptance.set(xlabel="tokens", ylabel="accepted, given all before", title=f"acceptance, {where}", ylim=(0, 1))
        if acceptance.lines:
            acceptance.legend()
        figure.suptitle(title)
        files = [logs / "curve.png", logs / "curve.svg"]
        for path in files:
            dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
            with replace_file(path, flush=False) as partial:
                figure.savefig(partial, dpi=120, format=path.suffix[1:], **dated)
        pyplot.close(figure)
    return files
