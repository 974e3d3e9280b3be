"""Time the CPU kernels against their floors and against what torch offers.

    python benchmarks/kernels.py [--shape smollm2-135m] [--dtype bfloat16] [--threads 1] [--json FILE]

The floor of a call is the longer of two times of this machine: to copy half as many bytes as the call reads and writes
(a copy reads and writes each byte, from whatever cache holds so many), and to multiply as much as it does in torch's
matrix product. Ours and the alternative run in turns. The time of a call is its shortest run, in CPU time if there is
one thread, so that other processes disturb it little. Both results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_rows import ROWS, SHAPES, Call, Row, Setting
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.kernels.loader import backend


def shortest(calls: list[Call], seconds: float) -> list[float]:
    """Return the least seconds of each call, run in turns; a short call is repeated until the clock can measure it."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best, inner = [float("inf")] * len(calls), []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        inner.append(max(1, int(1e-4 / (time.perf_counter() - start))))
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = clock()
            for _ in range(inner[i]):
                call()
            best[i] = min(best[i], (clock() - start) / inner[i])
        rounds += 1
    return best


@functools.cache
def copy_seconds(bytes_: int) -> float:
    source, target = torch.ones(bytes_, dtype=torch.uint8), torch.empty(bytes_, dtype=torch.uint8)
    return shortest([lambda: target.copy_(source)], 0.1)[0]


@functools.cache
def product_rate(dtype: torch.dtype) -> float:
    """Multiplications and additions per second of a matrix product, the better of float32 and this dtype."""
    calls: list[Call] = []
    for kind in {torch.float32, dtype}:
        a = torch.randn(512, 512).to(kind)
        calls.append(functools.partial(torch.mm, a, a))
    return 2 * 512**3 / min(shortest(calls, 0.3))


def floor(row: Row, dtype: torch.dtype) -> float:
    return max(copy_seconds(max(row.bytes // 2, 1)), row.flops / product_rate(dtype))


def measure(s: Setting, seconds: float) -> list[dict[str, Any]]:
    found = []
    for rows in ROWS:
        for row in rows(s):
            ours, theirs = (1e6 * x for x in shortest([row.ours, row.theirs], seconds))
            named = {"kernel": row.kernel, "case": row.case, "other": row.other}
            found.append(named | {"ours_us": ours, "floor_us": 1e6 * floor(row, s.dtype), "other_us": theirs})
    return found


def show(found: list[dict[str, Any]], title: str) -> None:
    shown = Table(title=title)
    for name in ("kernel", "case"):
        shown.add_column(name, no_wrap=True)
    for name in ("ours, us", "floor, us", "floor / ours", "otherwise, us"):
        shown.add_column(name, justify="right")
    shown.add_column("otherwise", no_wrap=True)
    shown.add_column("gain", justify="right")
    previous = ""
    for r in found:
        gain, share = f"{r['other_us'] / r['ours_us']:.1f}x", f"{100 * r['floor_us'] / r['ours_us']:.0f} %"
        times = (f"{r['ours_us']:.1f}", f"{r['floor_us']:.1f}", share, f"{r['other_us']:.1f}")
        shown.add_row(r["kernel"] if r["kernel"] != previous else "", r["case"], *times, r["other"], gain)
        previous = r["kernel"]
    Console(width=140).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="whose heads and vocabulary")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each line is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    setting = Setting(*SHAPES[options.shape], getattr(torch, options.dtype), options.contexts, options.nodes)
    about = {"date": datetime.date.today().isoformat(), "cpu": describe_machine().cpu, "threads": options.threads}
    about |= {"shape": options.shape, "dtype": options.dtype, "kernels": backend()}
    found = measure(setting, options.seconds)
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    title = (about["date"], about["cpu"], threads, options.shape, options.dtype, f"{about['kernels']} kernels")
    show(found, ", ".join(map(str, title)))
    if options.json:
        options.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
