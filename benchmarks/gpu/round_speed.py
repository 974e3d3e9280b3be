"""Step `round`: milliseconds of an engine-free round by phase, against bytes over bandwidth and against plain decoding.

The Llama has the shape of Llama-3.1-8B and random weights, the head that of its EAGLE-3 heads. Random drafts are almost
never accepted, and the time of a round hardly depends on how many are. So the result is a time per round, and the
accept length at which a round is as fast as plain decoding; more is gain. Bytes are counted once each
(benchmarks/roofline.py), the bandwidth is that of a copy on this device.
"""

from __future__ import annotations

import gc
import statistics
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.gpu.decoding import PlainDecoder, TreeDecoder, new_slot_table
from benchmarks.gpu.llama import Llama
from benchmarks.gpu.models import Size, size_for
from benchmarks.gpu.phases import Replay, Round, State, capturing, milliseconds
from benchmarks.gpu.steps import Setting
from benchmarks.roofline import plain_bytes, round_bytes
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.graphs import Capturer

SHAPES = (Shape(1, 4, 5), Shape(3, 4, 16), Shape(5, 8, 48))
BATCHES, CONTEXT, REPEATS = (1, 4, 16), 2048, 30
TINY_BATCHES, TINY_CONTEXT, TINY_REPEATS = (1, 2), 40, 3
COPIED_BYTES = 2**29


def run(setting: Setting) -> dict[str, Any]:
    """Time greedy rounds of every batch and shape, and sampled ones of one shape."""
    size = size_for(setting)
    batches: tuple[int, ...] = TINY_BATCHES if setting.tiny else BATCHES
    context, repeats = (TINY_CONTEXT, TINY_REPEATS) if setting.tiny else (CONTEXT, REPEATS)
    shapes = SHAPES[:2] if setting.tiny else SHAPES
    cases = [(shape, 0.0) for shape in shapes] + [(SHAPES[1], 0.8)]
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(setting)
    positions = context + repeats * max(shape.max_accept_length for shape in shapes) + 128
    target = size.target(positions, setting.device)
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {"model": size.name, "dtype": str(size.dtype).removeprefix("torch."), "context": context}
    about |= {"graphs": setting.on_gpu, "copy_gb_s": round(bandwidth / 1e9, 1), "rows": rows, "summary": []}
    # Emulated graphs would be slower than no graphs.
    with capturing(setting) if setting.on_gpu else nullcontext(lambda: None) as new_capturer:
        for batch in batches:
            slot_table = new_slot_table(batch, positions, setting.device)
            plain = time_plain(target, slot_table, context, repeats, new_capturer())
            plain_floor = 1e3 * plain_bytes(size.model, batch, context, size.dtype.itemsize) / bandwidth
            for shape, temperature in cases:
                free_memory()
                decoder = TreeDecoder(target, size.head(target, slot_table), slot_table, shape, temperature)
                times = time_round(decoder, context, repeats, new_capturer())
                del decoder
                row = {"batch": batch, "shape": str(shape), "temperature": temperature}
                row |= compare(times, floor_of(size, shape, batch, context, bandwidth), plain, plain_floor)
                rows.append(row)
                about["summary"].append(as_sentence(row))
                print(about["summary"][-1], flush=True)
                setting.keep(about)
    return about


def compare(
    times: dict[str, float], floors: dict[str, float], plain: float, plain_floor: float
) -> dict[str, float | dict[str, float]]:
    """A round and a step of plain decoding beside their floors; all arguments in milliseconds."""
    whole, floor = sum(times.values()), sum(floors.values())
    return {
        "ms": rounded(times | {"round": whole}),
        "floor_ms": rounded(floors | {"round": floor}),
        "share_of_floor": round(floor / whole, 3),
        "plain_ms": round(plain, 4),
        "plain_share_of_floor": round(plain_floor / plain, 3),
        "break_even_accept_length": round(whole / plain, 3),
    }


def as_sentence(row: dict[str, Any]) -> str:
    """A row as a sentence."""
    kind = "sampled" if row["temperature"] else "greedy"
    return (
        f"batch {row['batch']}, {row['shape']}, {kind}: {row['ms']['round']:.2f} ms per round "
        f"({100 * row['share_of_floor']:.0f} % of the bandwidth of a copy), plain {row['plain_ms']:.2f} ms "
        f"({100 * row['plain_share_of_floor']:.0f} %): faster from an accept length of "
        f"{row['break_even_accept_length']:.2f} on"
    )


def copy_bandwidth(setting: Setting) -> float:
    """Bytes that a copy reads and writes per second."""
    source = torch.ones(COPIED_BYTES // (16 if setting.tiny else 1), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = milliseconds({"copy": lambda: target.copy_(source)}, 10, source.device)["copy"]
    return 2 * source.nbytes / statistics.median(times) * 1e3


def start_at(decoder: PlainDecoder, context: int) -> None:
    """Fill the cache with noise, and let every request have `context` tokens."""
    for cache in (*decoder.cache.keys, *decoder.cache.values):
        cache.normal_()
    decoder.lengths.fill_(context)


def time_plain(target: Llama, slot_table: torch.Tensor, context: int, repeats: int, capturer: Capturer | None) -> float:
    """The median milliseconds of a step of plain decoding."""
    decoder = PlainDecoder(target, slot_table)
    start_at(decoder, context)
    before = State(decoder)
    step = Replay(decoder.step, capturer)
    before.restore()
    return statistics.median(milliseconds({"step": step}, repeats, target.device)["step"])


def free_memory() -> None:
    """Give back what graphs and caches that nothing names held: they refer to each other in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def time_round(decoder: TreeDecoder, context: int, repeats: int, capturer: Capturer | None) -> dict[str, float]:
    """The median milliseconds of each phase of a round."""
    start_at(decoder, context)
    captured = Round(decoder, capturer)
    times = milliseconds(dict(captured.phases()), repeats, decoder.target.device)
    return {name: statistics.median(values) for name, values in times.items()}


def floor_of(size: Size, shape: Shape, batch: int, context: int, bandwidth: float) -> dict[str, float]:
    """Bytes over bandwidth of each phase in milliseconds; the tail reads the logits that the verification wrote."""
    data = round_bytes(size.model, shape, batch, context, size.dtype.itemsize, size.draft_vocabulary)
    return {"draft": 1e3 * data.draft / bandwidth, "verify": 1e3 * data.verify / bandwidth} | {
        "tail": 1e3 * data.tail / bandwidth,
        "extend": 1e3 * data.extend / bandwidth,
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    """To a tenth of a microsecond."""
    return {name: round(value, 4) for name, value in values.items()}
