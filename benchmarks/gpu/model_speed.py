"""Steps `model` and `vllm-model`: a real target with its head: plain decoding, the engine's own EAGLE-3, the plugin.

All engines are started together and then asked in turn, each alone: in every repeat each of them answers the demo's
questions with 1, 8 and 32 requests at a time, greedily, and some of them at temperature 1. Two more engines in float32
must give the same greedy text.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.engine_text import LINES, SERVES
from benchmarks.gpu.model_cases import CASES, SAMPLED_CASES
from benchmarks.gpu.model_process import EngineProcess, started
from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.models.shipped import HEAD, head_folder, question_files
from eagle_plugin.models.target import target_folder

TARGET = "smollm2-135m-instruct"
OTHERS = r"eagle-plugin [^\n]*is served by (?:SGLang|vLLM)'s own worker[^\n]*"  # why, in a log
FLOAT32 = ("plain-float32", "plugin-float32")
CONCURRENCY = (1, 8, 32)
REPEATS = 3
TOKENS, EQUAL_TOKENS, TINY_TOKENS = 128, 64, 16


class Measured(NamedTuple):
    """One case at one temperature and number of requests at a time."""

    case: str
    temperature: float
    concurrency: int


def run(setting: Setting) -> dict[str, Any]:
    """Measure every case that starts; StepError where the plugin does not serve, or says something else."""
    engine = setting.engine or "sglang"
    need_modules(engine, "tokenizers", "transformers")
    target, head = target_folder(TARGET), head_folder(HEAD)
    prompts = read_prompts(target)[: 4 if setting.tiny else None]
    names = ("plain", "plugin", *FLOAT32) if setting.tiny else tuple(CASES[engine])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        starting = {name: stack.enter_context(started(name, target, head, Path(folder), setting)) for name in names}
        engines, failed = wait_for_all(starting)
        rows = measure(engines, SAMPLED_CASES[engine], prompts, setting)
        for sentence in sentences(rows, engines):
            print(sentence, flush=True)  # also when a text differs
        equal = compare(*(engines[name] for name in FLOAT32), prompts, setting)
        lines = {name: re.findall(LINES, one.log()) for name, one in engines.items() if one.case.plugin}
    found = {"target": TARGET, "head": HEAD, "failed": failed, "equal": equal, "rows": rows, "lines": lines}
    return found | {"summary": [equal["sentence"], *sentences(rows, engines)]}


def wait_for_all(starting: dict[str, EngineProcess]) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """The engines that serve, and why the others do not.

    StepError where plain decoding or the plugin is among the others: then there is nothing to compare.
    """
    engines, failed = {}, {}
    for name, engine in starting.items():
        try:
            seconds = engine.wait_for_start()
            if engine.case.plugin and SERVES not in engine.log():
                found = re.findall(OTHERS, engine.log()) or ["the engine's log has no reason"]
                raise StepError(f"{engine.case.what}: the plugin does not serve: {found[0]}")
        except StepError as error:
            failed[name] = str(error)
            print(error, flush=True)
        else:
            engines[name] = engine
            print(f"{engine.case.what} started in {seconds:.0f} s", flush=True)
    for name in ("plain", "plugin", *FLOAT32):
        if name in failed:
            raise StepError(failed[name])
    return engines, failed


def read_prompts(target: Path) -> list[list[int]]:
    """The demo's questions as the chat template renders them."""
    from transformers import AutoTokenizer

    from eagle_plugin.bench.questions import read_questions

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}], add_generation_prompt=True, return_dict=False
        )
        for question in read_questions(question_files())
    ]


def compare(plain: EngineProcess, ours: EngineProcess, prompts: list[list[int]], setting: Setting) -> dict[str, Any]:
    """Greedy text in float32 by trees and by plain decoding; StepError where too few are equal."""
    tokens = TINY_TOKENS if setting.tiny else EQUAL_TOKENS
    wanted, found = (engine.ask(prompts, 0.0, tokens) for engine in (plain, ours))
    same = [a == b for a, b in zip(wanted["text"], found["text"], strict=True)]
    length = (found["tokens"] - len(prompts)) / found["rounds"]
    sentence = f"{sum(same)} of {len(same)} greedy texts in float32 are those of plain decoding, accept length "
    sentence += f"{length:.2f}"
    # Two tokens that are nearly equally likely may change places, because sums of other sizes round otherwise.
    if sum(same) < 0.9 * len(same) or length < 1.2:
        raise StepError(f"{sentence}; wanted nine tenths of the texts and an accept length of 1.2")
    return {"texts": len(same), "equal": sum(same), "accept_length": round(length, 3), "sentence": sentence}


def measure(
    engines: dict[str, EngineProcess], sampled: tuple[str, ...], prompts: list[list[int]], setting: Setting
) -> list[dict[str, Any]]:
    """Tokens per second of every case in bfloat16, one engine at a time, in another order in every repeat."""
    names = [name for name, engine in engines.items() if engine.case.dtype == "bfloat16"]
    wanted = [Measured(name, 0.0, many) for many in CONCURRENCY[: 2 if setting.tiny else None] for name in names]
    wanted += [Measured(name, 1.0, many) for many in ((1,) if setting.tiny else (1, 8)) for name in sampled]
    wanted = [one for one in wanted if one.case in names]
    tokens = TINY_TOKENS if setting.tiny else TOKENS
    for name in names:  # compilers, and the policy's first measurements
        for many in (1, 8) if setting.tiny else (1, 8, 8, 32):
            engines[name].ask(list(itertools.islice(itertools.cycle(prompts), many)), 0.0, tokens)
    seen: dict[Measured, list[dict[str, float]]] = {one: [] for one in wanted}
    for repeat in range(1 if setting.tiny else REPEATS):
        for one in wanted if repeat % 2 == 0 else reversed(wanted):
            seen[one].append(ask_in_groups(engines[one.case], prompts, one, tokens))
    plain = {one: median(seen[one], "tokens_per_s") for one in wanted if one.case == "plain"}
    return [as_row(one, seen[one], plain[one._replace(case="plain")]) for one in wanted]


def ask_in_groups(engine: EngineProcess, prompts: list[list[int]], one: Measured, tokens: int) -> dict[str, float]:
    """Ask all questions, so many at a time; with more requests than questions, some twice."""
    questions = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), one.concurrency)))
    found = [
        engine.ask(questions[first : first + one.concurrency], one.temperature, tokens, forget=first == 0)
        for first in range(0, len(questions), one.concurrency)
    ]
    total = {name: sum(answers[name] for answers in found) for name in ("tokens", "seconds", "rounds")}
    drafted = total["tokens"] - len(questions)  # the first token of an answer comes from its prompt
    length = drafted / total["rounds"] if total["rounds"] else 0.0
    return {"tokens_per_s": total["tokens"] / total["seconds"], "accept_length": length}


def median(found: list[dict[str, float]], name: str) -> float:
    """Of the repeats."""
    return statistics.median(one[name] for one in found)


def as_row(one: Measured, found: list[dict[str, float]], plain: float) -> dict[str, Any]:
    """A row of the result; plain: tokens per second of plain decoding with as many requests."""
    speeds = sorted(repeat["tokens_per_s"] for repeat in found)
    length = median(found, "accept_length")
    return one._asdict() | {
        "tokens_per_s": round(statistics.median(speeds), 1),
        "lowest": round(speeds[0], 1),
        "highest": round(speeds[-1], 1),
        "times_plain": round(statistics.median(speeds) / plain, 2),
        "accept_length": round(length, 3) if length else None,
    }


def sentences(rows: list[dict[str, Any]], engines: dict[str, EngineProcess]) -> list[str]:
    """One per row."""
    found = []
    for row in rows:
        length = f", accept length {row['accept_length']:.2f}" if row["accept_length"] else ""
        many = "1 request" if row["concurrency"] == 1 else f"{row['concurrency']} requests"
        found.append(
            f"{engines[row['case']].case.what}, T = {row['temperature']:g}, {many}: {row['tokens_per_s']:,.0f} "
            f"tokens/s, {row['times_plain']:.2f}x plain{length}"
        )
    return found
