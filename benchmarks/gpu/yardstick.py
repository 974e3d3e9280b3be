"""Steps `yardstick` and `vllm-yardstick`: the cost of a round of large models in the real engines, acceptance given.

No large model is needed: targets have dummy weights, heads random ones, and the number of accepted drafts is drawn from
rates that were recorded with a real head, those of each shape. Two things are stated: what a round costs, in steps of
plain decoding, which no rate changes much; and tokens per second at these rates. The text means nothing.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine_text import LINES
from benchmarks.gpu.model_cases import GRAPHS, engine_facts
from benchmarks.gpu.model_process import EngineProcess, serving
from benchmarks.gpu.model_speed import about_of, log_folder
from benchmarks.gpu.model_start import start_all
from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from benchmarks.gpu.yardstick_cases import (
    CASES,
    NEEDED,
    Size,
    Start,
    arguments,
    cases_of,
    environment,
    recorded_rates,
    size_of,
    wanted_length,
)
from benchmarks.gpu.yardstick_models import MODELS, TINY_MODELS, Model, write_models
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.synthetic import Rates
from eagle_plugin.runtime.synthetic import format_rates

SPECIAL = 2  # token ids below are the configuration's special ones


def run(setting: Setting) -> dict[str, Any]:
    """Measure every case that starts; StepError where one that is needed has no row."""
    engine = setting.engine or "sglang"
    need_modules(engine)
    size, rates = size_of(setting), recorded_rates()
    models = TINY_MODELS if setting.tiny else MODELS[:1] if setting.short else MODELS
    found: dict[str, Any] = {"rates": format_rates(rates), "size": size._asdict(), "failed": {}, "rows": []}
    found |= {"lines": {}, **engine_facts(engine, setting.on_gpu)}
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            places = write_models(model, Path(folder), size.dtype, setting.device)
            if setting.on_gpu:
                torch.cuda.empty_cache()  # of this process: the engines need it
            for names in together(model, size, cases_of(engine, setting), setting):
                measure_cases(model, names, places, size, rates, setting, found)
    measured = {(row["model"], row["case"]) for row in found["rows"]}
    if missing := [
        f"{name} of {model.name}" for model in models for name in NEEDED if (model.name, name) not in measured
    ]:
        raise StepError(f"no row of {', '.join(missing)}: {next(iter(found['failed'].values()), 'no engine started')}")
    return found | {"summary": [as_sentence(row) for row in found["rows"]]}


def fraction_of(model: Model, size: Size, setting: Setting) -> float:
    """The part of the GPU's memory that an engine of a model may take; the engines leave a little of all of it."""
    if not setting.on_gpu:
        return 1.0
    _, total = torch.cuda.mem_get_info(setting.device)
    return min(model.memory_with(size.cache) * 2**30 / total, 0.93)


def together(model: Model, size: Size, names: list[str], setting: Setting) -> Iterator[list[str]]:
    """The cases in groups of as many engines as the GPU has memory for, or a small machine without one."""
    count = 2
    if setting.on_gpu:
        free, _ = torch.cuda.mem_get_info(setting.device)
        count = max(int(free / 2**30 / model.memory_with(size.cache)), 1)
    for first in range(0, len(names), count):
        yield names[first : first + count]


def measure_cases(
    model: Model,
    names: Sequence[str],
    places: tuple[Path, Path],
    size: Size,
    rates: dict[Shape, Rates],
    setting: Setting,
    found: dict[str, Any],
) -> None:
    """Start engines together, then measure each alone; rows and failures go into `found`, as soon as each is known."""
    with log_folder(setting) as logs, ExitStack() as stack:

        def start(name: str, mode: str) -> AbstractContextManager[EngineProcess]:
            return started(name, model, places, logs, size, rates, setting, mode)

        failed: dict[str, str] = {}
        engines = start_all(names, start, setting, stack, failed)
        found["failed"] |= {f"{name} of {model.name}": reason for name, reason in failed.items()}
        for name, engine in engines.items():
            found["lines"][f"{name} of {model.name}"] = re.findall(LINES, engine.log())
        setting.keep(found)
        for name in engines:
            with failing(model, name, found, setting):
                for requests in size.requests:
                    row = measure(engines[name], model, requests, size, rates)
                    found["rows"].append(compare({"case": name} | row, found["rows"]))
                    setting.keep(found)
                    print(as_sentence(found["rows"][-1]), flush=True)


@contextmanager
def failing(model: Model, name: str, found: dict[str, Any], setting: Setting) -> Iterator[None]:
    """An engine that fails leaves the others."""
    try:
        yield
    except StepError as error:
        found["failed"][f"{name} of {model.name}"] = str(error)
        setting.keep(found)
        print(error, flush=True)


def started(
    name: str,
    model: Model,
    places: tuple[Path, Path],
    logs: Path,
    size: Size,
    rates: dict[Shape, Rates],
    setting: Setting,
    mode: str,
) -> AbstractContextManager[EngineProcess]:
    """An engine in a process group of its own, which ends with the context."""
    engine, on_gpu = setting.engine or "sglang", setting.on_gpu
    again = "-graphs" if engine == "vllm" and mode == GRAPHS else ""
    case, log = CASES[engine][name], logs / f"{model.name.replace(' ', '-')}-{name}{again}.log"
    given = arguments(engine, case, Start(*places, on_gpu, fraction_of(model, size, setting), size, rates), mode)
    return serving(case, engine, given, environment(engine, case, on_gpu, rates), log, mode)


def measure(
    engine: EngineProcess, model: Model, requests: int, size: Size, rates: dict[Shape, Rates]
) -> dict[str, Any]:
    """A row: medians over repeats with new prompts, after one that is not counted."""
    draw = random.Random(requests)
    answers = []
    for _ in range(1 + size.repeats):
        tokens = range(SPECIAL, model.decoder.vocabulary)
        prompts = [draw.choices(tokens, k=size.prompt) for _ in range(requests)]
        answers.append(engine.ask(prompts, 0.0, size.answer, timed=True))
    middle = {name: statistics.median(answer[name] for answer in answers[1:]) for name in answers[0]}
    row = about_of(engine) | {"model": model.name, "requests": requests}
    row |= {"round_ms": round(middle["round_ms"], 3), "tokens_per_s": round(middle["tokens_per_s"], 1)}
    row["accept_length"] = round(middle["accept_length"], 3)
    wanted = wanted_length(engine.case, rates)
    return row | {"given_length": None if wanted is None else round(wanted, 3)}


def compare(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with what plain decoding of the same model and requests makes of it; None where it has no row."""
    like = [other for other in (*rows, row) if other["case"] == "plain"]
    like = [other for other in like if (other["model"], other["requests"]) == (row["model"], row["requests"])]
    if not like:
        return row | {"plain_steps": None, "times_plain": None}
    steps, speed = row["round_ms"] / like[0]["round_ms"], row["tokens_per_s"] / like[0]["tokens_per_s"]
    return row | {"plain_steps": round(steps, 3), "times_plain": round(speed, 3)}


def as_sentence(row: dict[str, Any]) -> str:
    """A row as a sentence."""
    many = "1 request" if row["requests"] == 1 else f"{row['requests']} requests"
    how = f" ({row['mode']})" if row["mode"] else ""
    found = f"{row['model']}, {row['what']}{how}, {many}: a round takes {row['round_ms']:.2f} ms"
    if row["plain_steps"] is not None:
        found += f" ({row['plain_steps']:.2f} plain steps)"
    found += f", accept length {row['accept_length']:.2f}, {row['tokens_per_s']:,.0f} tokens/s"
    return found if row["times_plain"] is None else f"{found}, {row['times_plain']:.2f}x plain"
