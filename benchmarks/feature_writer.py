"""Measure the way of hidden states from a worker's host memory to a shard: bytes per second and per CPU-second.

    python benchmarks/feature_writer.py [--tokens 256] [--width 32768] [--seconds 8] [--shard-mib 64] [--store DIR]

A worker's collector gets documents of so many tokens (bfloat16 states, `--width` values per token: Llama-3.3-70B with
three aux layers has 32,768), each as one prefill, as fast as the writer takes them. Shards are removed as they come.
CPU-seconds are those of this process and of the writer, without its start; making the documents is not in them, because
all are views of one tensor. DIR should be in memory (/dev/shm), so that no disk is measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from eagle_plugin.collect.collector import Collector, Ending, StepRows
from eagle_plugin.collect.recorder import FeatureRecorder
from eagle_plugin.collect.settings import CollectSettings, StatesFacts
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.traffic.served import ServedTarget

WARM = 24  # documents before the measurement begins
NEVER = Ending(frozenset(), 0, 1 << 30)


def main(argv: list[str] | None = None) -> int:
    """Run the measurement and print it as JSON."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=arguments.store))
    try:
        print(json.dumps(measure(folder, arguments), indent=1))
    finally:
        shutil.rmtree(folder)
    return 0


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """What one collector and its writer reach."""
    target, tokens = folder / "target", arguments.tokens
    target.mkdir()
    (target / "config.json").write_text("{}")
    facts = StatesFacts(ServedTarget.of(str(target)), (1, 2, 3), "bfloat16", arguments.width // 4, 9, 32_000)
    settings = CollectSettings(str(folder / "store"), shard_mib=arguments.shard_mib, queue_mib=128, facts=facts)
    collector = Collector.of(settings)
    recorder = collector._queue
    assert isinstance(recorder, FeatureRecorder)
    states = torch.randn(tokens, arguments.width).bfloat16()
    ids, positions, size = torch.arange(tokens), torch.arange(tokens), states.nbytes
    writer, over = psutil.Process(recorder._process.pid), threading.Event()
    remover = threading.Thread(target=_remove_shards, args=(folder / "store", over))
    remover.start()
    before, count, began = (0.0, 0.0), 0, 0.0
    while count < WARM or time.monotonic() - began < arguments.seconds:
        if count == WARM and not began:  # memory that is used again has been touched once
            _wait_for(recorder, count)
            before, began = _cpu_s(writer), time.monotonic()
        if recorder._bytes + 2 * size > settings.queue_mib << 20:
            time.sleep(0.001)
            continue
        name = str(count)
        collector.begin(name, name, "s", "train", tokens, 8, NEVER)
        one = torch.tensor([tokens])
        collector.add(StepRows([name], [tokens], one, ids, positions, states, torch.tensor([1])))
        count += 1
    _wait_for(recorder, count)
    wall, spent = time.monotonic() - began, [now - then for now, then in zip(_cpu_s(writer), before, strict=True)]
    recorder.close()
    over.set()
    remover.join()
    done = (count - WARM) * size / 1e9
    return {
        "documents": count - WARM,
        "GB": done,
        "GB per second": done / wall,
        "GB per CPU-second": done / sum(spent),
        "GB per CPU-second of the server": done / spent[0],
        "GB per CPU-second of the writer": done / spent[1],
    }


def _wait_for(recorder: FeatureRecorder, count: int) -> None:
    while recorder.totals()["documents"] < count:
        time.sleep(0.01)
        assert recorder.totals().keys() <= {"documents", "tokens", "bytes"}, recorder.totals()


def _cpu_s(writer: psutil.Process) -> tuple[float, float]:
    own, times = resource.getrusage(resource.RUSAGE_SELF), writer.cpu_times()
    return own.ru_utime + own.ru_stime, times.user + times.system


def _remove_shards(store: Path, over: threading.Event) -> None:
    while not over.wait(0.02):
        for path in store.glob("shard-*"):
            path.unlink()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="feature_writer", description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=positive_number, default=256, metavar="N", help="of a document (256)")
    parser.add_argument("--width", type=positive_number, default=32_768, metavar="N", help="values per token (32768)")
    parser.add_argument("--seconds", type=positive_number, default=8, metavar="N", help="of the measurement (8)")
    parser.add_argument("--shard-mib", type=positive_number, default=64, metavar="N", help="of a shard (64)")
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"), metavar="DIR", help="where shards are written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
