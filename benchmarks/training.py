"""The speed of training a head of SmolLM2-135M's size: tokens per second of one optimiser step, on random features.

    python benchmarks/training.py                        # an EAGLE-3 head, 1, 3 and 4 draft steps
    python benchmarks/training.py --kind peagle --steps 8
    python benchmarks/training.py --teacher draft --draft-vocab 16384 --columns 0 3072      # the whole softmax, a part

A token is a row of the batch, prompt or response. Configurations are interleaved. The wall clock counts what other
processes take; the processor's time does not, so "tokens/s (busy)" is what the threads would do undisturbed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

# Fresh pages come at a tenth of the speed of used memory; glibc reads these at its start only.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
if __name__ == "__main__" and any(os.environ.get(key) != value for key, value in MEMORY.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MEMORY)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.gpu.training import KINDS, SMALL, Trainer, make_batch, make_head, make_readout  # noqa: E402
from eagle_plugin.common.devices import fast_dtype  # noqa: E402
from eagle_plugin.learning.train.methods import ObjectiveSettings  # noqa: E402
from eagle_plugin.learning.train.model import DTYPES  # noqa: E402
from eagle_plugin.learning.train.objectives import Objective  # noqa: E402


class Timed:
    """One configuration, and the seconds of its updates."""

    def __init__(self, options: argparse.Namespace, steps: int, columns: int) -> None:
        torch.manual_seed(0)
        size, dtype = SMALL._replace(drafts=options.draft_vocab), DTYPES[options.dtype]
        settings = ObjectiveSettings(
            steps=steps, teacher=options.teacher, columns=columns, dtype=dtype, segment_rows=options.segment_rows
        )
        head, readout = make_head(options.kind, size, options.norms), make_readout(size, 0.05, "cpu", dtype)
        batch = make_batch(size, [options.length] * max(1, options.batch_tokens // options.length))
        self.name = f"{steps}" + (f", {columns} columns" if columns else "")
        self.tokens, self._trainer = len(batch), Trainer(Objective(head, readout, settings), batch)
        self._trainer.update()  # warm up: pages, oneDNN's kernels
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def update(self) -> None:
        """Train on the batch once and note the time."""
        start, busy = time.perf_counter(), time.process_time()
        self._trainer.update()
        self.seconds.append(time.perf_counter() - start)
        self.busy.append(time.process_time() - busy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="eagle3")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 4], help="draft steps (default: 1 3 4)")
    parser.add_argument("--norms", choices=("3.0", "3.1"), default="3.1")
    parser.add_argument("--teacher", choices=("full", "draft"), default="full")
    parser.add_argument("--columns", type=int, nargs="+", default=[0], help="of lm_head per chunk; 0: all (default)")
    parser.add_argument("--dtype", choices=list(DTYPES), default=fast_dtype("cpu"), help="default: %(default)s, here")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256, help="tokens of a document (default: 256)")
    parser.add_argument("--segment-rows", type=int, default=2048, help="P-EAGLE: masked rows at once (default: 2048)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timed = [Timed(options, steps, columns) for steps in options.steps for columns in options.columns]
    for _ in range(options.rounds):
        for one in timed:
            one.update()
    title = f"{options.kind}, {options.dtype}, {options.threads} threads, documents of {options.length} tokens"
    title += f", teacher {options.teacher}"
    table = Table("steps", "tokens", "median s", "tokens/s", "fastest", "tokens/s (busy)", title=title)
    for one in timed:
        median, busy = statistics.median(one.seconds), statistics.median(one.busy) / options.threads
        speeds = (f"{one.tokens / seconds:,.0f}" for seconds in (median, min(one.seconds), busy))
        table.add_row(one.name, f"{one.tokens:,}", f"{median:.3f}", *speeds)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
