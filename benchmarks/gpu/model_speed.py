"""Steps `model` and `vllm-model`: a real target with its head: plain decoding, the engine's own EAGLE-3, the plugin.

All engines start at the same time; one of vLLM that does not start compiled starts again with graphs alone, which its
rows say. Two of them, in float32, must give the same greedy text. The others are asked in turn, each alone: in every
repeat each of them answers the demo's questions with 1, 8 and 32 requests at a time, greedily, and some of them at
temperature 1. What is known is kept after every answer, and an engine that fails leaves the others'.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_text import LINES
from benchmarks.gpu.model_cases import (
    CASES,
    FLOATS,
    NEED_FLASHINFER,
    SAMPLED_CASES,
    Amount,
    amount_of,
    cases_of,
    engine_facts,
    environment,
)
from benchmarks.gpu.model_process import EngineProcess, started
from benchmarks.gpu.model_rows import Measured, as_sentence, rows_of
from benchmarks.gpu.model_start import start_all
from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.models.shipped import HEAD, head_folder, question_files
from eagle_plugin.models.target import target_folder

TARGET = "smollm2-135m-instruct"
FLOAT32 = tuple(FLOATS)
NEEDED = ("plain", "plugin", *FLOAT32)  # without these the step fails, after it has measured the others


def run(setting: Setting) -> dict[str, Any]:
    """Measure every case that starts; StepError at the end where the plugin did not serve, or gave another text."""
    engine, amount = setting.engine or "sglang", amount_of(setting)
    need_modules(engine, "tokenizers", "transformers")
    target, head = target_folder(TARGET), head_folder(HEAD)
    prompts = some_of(read_prompts(target), amount.questions)
    found: dict[str, Any] = {"target": TARGET, "head": HEAD, "amount": amount._asdict(), "failed": {}, "rows": []}
    found |= facts(engine, setting)
    with log_folder(setting) as folder, ExitStack() as stack:

        def start(name: str, mode: str) -> AbstractContextManager[EngineProcess]:
            return started(name, target, head, folder, setting, mode)

        engines = start_all(cases_of(engine, setting), start, setting, stack, found["failed"])
        found["modes"] = {name: one.mode for name, one in engines.items()}
        found["lines"] = {name: re.findall(LINES, one.log()) for name, one in engines.items() if one.case.plugin}
        setting.keep(found)
        found["equal"] = equal_text(engines, prompts, amount, found["failed"])
        setting.keep(found)
        for rows in measure(engines, sampled_cases(engine), prompts, amount, found["failed"]):
            found["rows"] = rows
            setting.keep(found)
    if reasons := [found["failed"][name] for name in (*NEEDED, "text") if name in found["failed"]]:
        raise StepError(reasons[0] if len(reasons) == 1 else f"{reasons[0]}; and {len(reasons) - 1} more, see `failed`")
    return found | {"summary": [found["equal"]["sentence"], *map(as_sentence, found["rows"])]}


def facts(engine: str, setting: Setting) -> dict[str, Any]:
    """What the rows depend on beside the versions, printed too."""
    forced = environment(engine, CASES[engine]["plugin"], setting.on_gpu)["EAGLE_PLUGIN"] == "force"
    flashinfer = importlib.util.find_spec("flashinfer") is not None
    if forced:
        print("the plugin serves because of EAGLE_PLUGIN=force")
    if not flashinfer:
        print("FlashInfer is not installed: the engine samples without it", flush=True)
        for name in NEED_FLASHINFER[engine]:
            print(f"{CASES[engine][name].what}: not asked at temperature 1, which needs FlashInfer", flush=True)
    return {"forced": forced, "flashinfer": flashinfer, **engine_facts(engine, setting.on_gpu)}


def sampled_cases(engine: str) -> tuple[str, ...]:
    """The cases that can be asked at temperature 1 here."""
    without = () if importlib.util.find_spec("flashinfer") else NEED_FLASHINFER[engine]
    return tuple(name for name in SAMPLED_CASES[engine] if name not in without)


@contextmanager
def log_folder(setting: Setting) -> Iterator[Path]:
    """Where the engines' logs go."""
    if setting.logs is not None:
        setting.logs.mkdir(parents=True, exist_ok=True)
        yield setting.logs
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


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


def some_of(prompts: list[list[int]], number: int | None) -> list[list[int]]:
    """So many of them, evenly spread over all kinds of questions."""
    if number is None or number >= len(prompts):
        return prompts
    return [prompts[place * len(prompts) // number] for place in range(number)]


def equal_text(
    engines: dict[str, EngineProcess], prompts: list[list[int]], amount: Amount, failed: dict[str, str]
) -> dict[str, Any]:
    """What `compare` found; where it failed, `sentence` alone, which goes to `failed` too. The engines end."""
    pair = [engines.pop(name, None) for name in FLOAT32]
    try:
        plain, ours = pair
        if plain is None or ours is None:
            raise StepError("no text was compared: an engine in float32 did not start")
        found = compare(plain, ours, prompts, amount)
    except StepError as error:
        failed["text"] = str(error)
        found = {"sentence": str(error)}
    print(found["sentence"], flush=True)
    for engine in pair:
        if engine is not None:
            engine.end()
    return found


def compare(plain: EngineProcess, ours: EngineProcess, prompts: list[list[int]], amount: Amount) -> dict[str, Any]:
    """Greedy text in float32 by trees and by plain decoding; StepError where too few are equal."""
    wanted, found = (engine.ask(prompts, 0.0, amount.equal_tokens) for engine in (plain, ours))
    same = [a == b for a, b in zip(wanted["text"], found["text"], strict=True)]
    length = (found["tokens"] - len(prompts)) / found["rounds"]
    sentence = f"{sum(same)} of {len(same)} greedy texts in float32 are those of plain decoding, accept length "
    sentence += f"{length:.2f}"
    # Two tokens that are nearly equally likely may change places, because sums of other sizes round otherwise.
    if sum(same) < 0.9 * len(same) or length < 1.2:
        raise StepError(f"{sentence}; wanted nine tenths of the texts and an accept length of 1.2")
    return {"texts": len(same), "equal": sum(same), "accept_length": round(length, 3), "sentence": sentence}


def measure(
    engines: dict[str, EngineProcess],
    sampled: tuple[str, ...],
    prompts: list[list[int]],
    amount: Amount,
    failed: dict[str, str],
) -> Iterator[list[dict[str, Any]]]:
    """Tokens per second of every case in bfloat16, one engine at a time, in another order in every repeat.

    Yields all rows that are known, after every measurement. An engine that fails is asked no more.
    """
    wanted = [Measured(name, 0.0, many) for many in amount.concurrency for name in engines]
    wanted += [Measured(name, 1.0, many) for many in amount.sampled for name in sampled if name in engines]
    seen: dict[Measured, list[dict[str, Any]]] = {one: [] for one in wanted}
    for repeat in range(amount.repeats):
        for one in wanted if repeat % 2 == 0 else reversed(wanted):
            engine = engines[one.case]
            if one.case in failed:
                continue
            try:
                if not any(seen[other] for other in wanted if other.case == one.case):
                    for many in amount.warm_up:
                        engine.ask(list(itertools.islice(itertools.cycle(prompts), many)), 0.0, amount.tokens)
                seen[one].append(ask_in_groups(engine, prompts, one, amount.tokens))
            except StepError as error:
                failed[one.case] = str(error)
                print(error, flush=True)
                engine.end()
                continue
            rows = rows_of(seen, {name: about_of(one) for name, one in engines.items()})
            print(as_sentence(next(row for row in rows if row.items() >= one._asdict().items())), flush=True)
            yield rows


def about_of(engine: EngineProcess) -> dict[str, Any]:
    """What every row of an engine says."""
    return {"what": engine.case.what, "mode": engine.mode, "without_graphs": engine.without_graphs()}


def ask_in_groups(engine: EngineProcess, prompts: list[list[int]], one: Measured, tokens: int) -> dict[str, Any]:
    """Ask all questions, so many at a time; with more requests than questions, some twice. text: token ids."""
    questions = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), one.concurrency)))
    found = [
        engine.ask(questions[first : first + one.concurrency], one.temperature, tokens, forget=first == 0)
        for first in range(0, len(questions), one.concurrency)
    ]
    total = {name: sum(answers[name] for answers in found) for name in ("tokens", "seconds", "rounds")}
    drafted = total["tokens"] - len(questions)  # the first token of an answer comes from its prompt
    length = drafted / total["rounds"] if total["rounds"] else 0.0
    text = [text for answers in found for text in answers["text"]]
    return {"tokens_per_s": total["tokens"] / total["seconds"], "accept_length": length, "text": text}
