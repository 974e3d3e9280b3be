"""Step `model`: a real target and its head in SGLang: plain decoding, SGLang's own EAGLE-3, and the plugin.

All engines are started together and then asked in turn, each alone: in every repeat each of them answers the demo's
questions with 1, 8 and 32 requests at a time, greedily; plain decoding and the plugin also at temperature 1. Two more
engines in float32 must give the same greedy text.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.engine_text import LINES, SERVES
from benchmarks.gpu.model_engine import CASES, environment
from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.bench.orphans import Guard
from eagle_plugin.models.shipped import HEAD, head_folder, question_files
from eagle_plugin.models.target import target_folder

ROOT = Path(__file__).resolve().parents[2]
TARGET = "smollm2-135m-instruct"
START_LIMIT, ANSWER_LIMIT = 300, 120  # seconds
CONCURRENCY = (1, 8, 32)
REPEATS = 3
TOKENS, EQUAL_TOKENS = 128, 64
SAMPLED = ("plain", "plugin")  # the cases that are asked at temperature 1, too: SGLang's own needs FlashInfer for it


class Measured(NamedTuple):
    """One case at one temperature and number of requests at a time."""

    case: str
    temperature: float
    concurrency: int


def run(setting: Setting) -> dict[str, Any]:
    """Measure every case; StepError where no plain engine starts, the plugin does not serve, or a text differs."""
    need_modules("sglang", "tokenizers", "transformers")
    target, head = target_folder(TARGET), head_folder(HEAD)
    prompts = read_prompts(target)[: 4 if setting.tiny else None]
    cases = ["plain", "plugin", "plain-float32", "plugin-float32"] if setting.tiny else list(CASES)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        starting = {case: stack.enter_context(started(case, target, head, Path(name), setting)) for case in cases}
        engines, failed = {}, {}
        for case, engine in starting.items():
            try:
                engine.wait_for_start()
                engines[case] = engine
            except StepError as error:
                failed[case] = str(error)
                print(error, flush=True)
        for case in ("plain", "plugin", "plain-float32", "plugin-float32"):
            if case in failed:
                raise StepError(failed[case])
        equal = compare(engines, prompts, setting)
        speeds = measure(engines, prompts, setting)
        lines = {case: re.findall(LINES, engine.log()) for case, engine in engines.items() if CASES[case].plugin}
        served_by_us = {case: SERVES in engine.log() for case, engine in engines.items() if CASES[case].plugin}
    wrong = [case for case, ours in served_by_us.items() if not ours]
    if wrong:
        raise StepError(f"{CASES[wrong[0]].what}: the plugin does not serve; the log of the step has the reason")
    found = {"target": TARGET, "head": HEAD, "cases": {case: CASES[case].what for case in engines}, "failed": failed}
    return found | {"equal": equal, "rows": speeds, "lines": lines, "summary": [equal["sentence"], *sentences(speeds)]}


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


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, case: str, process: subprocess.Popen[str], log: Path) -> None:
        self.case, self.start_seconds = case, 0.0
        self._process, self._log = process, log

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_start(self) -> None:
        """StepError with the reason when it does not start."""
        self.start_seconds = float(self._read(START_LIMIT)["start_seconds"])

    def ask(self, prompts: list[list[int]], parameters: dict[str, Any], flush: bool = False) -> dict[str, Any]:
        """Send requests at the same time; their answers."""
        assert self._process.stdin is not None
        batch = {"prompts": prompts, "parameters": [parameters] * len(prompts), "flush": flush}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(batch) + "\n")
            self._process.stdin.flush()
        return self._read(ANSWER_LIMIT)

    def _read(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(limit) else ""
        if not line:
            text = self.log()
            print(text[-5000:])
            reason = re.findall(r"^\S*(?:Error|Exception)\b[^\n]*", text, re.MULTILINE)
            raise StepError(f"{CASES[self.case].what} does not answer: {reason[-1] if reason else 'see the log'}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(case: str, target: Path, head: Path, folder: Path, setting: Setting) -> Iterator[EngineProcess]:
    """An engine that starts; all its processes end with the context."""
    log = folder / f"{case}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.model_engine", case, "--target", str(target), "--head", str(head)]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*command, "--device", setting.device],
            cwd=ROOT,
            env=os.environ | environment(CASES[case], setting.on_gpu),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
        guard = Guard(process.pid)
        try:
            yield EngineProcess(case, process, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.dismiss()


def greedy(tokens: int) -> dict[str, Any]:
    """Sampling parameters."""
    return {"temperature": 0, "max_new_tokens": tokens}


def compare(engines: dict[str, EngineProcess], prompts: list[list[int]], setting: Setting) -> dict[str, Any]:
    """Greedy text in float32 by trees and by plain decoding; StepError where too few are equal."""
    tokens = 16 if setting.tiny else EQUAL_TOKENS
    plain, ours = (engines[f"{name}-float32"].ask(prompts, greedy(tokens)) for name in ("plain", "plugin"))
    same = [a == b for a, b in zip(plain["text"], ours["text"], strict=True)]
    length = (ours["tokens"] - len(prompts)) / ours["rounds"]
    sentence = f"{sum(same)} of {len(same)} greedy texts in float32 are those of plain decoding, accept length "
    sentence += f"{length:.2f}"
    # Two tokens that are nearly equally likely may change places, because sums of other sizes round otherwise.
    if sum(same) < 0.9 * len(same) or length < 1.2:
        raise StepError(f"{sentence}; wanted nine tenths of the texts and an accept length of 1.2")
    return {"texts": len(same), "equal": sum(same), "accept_length": round(length, 3), "sentence": sentence}


def measure(engines: dict[str, EngineProcess], prompts: list[list[int]], setting: Setting) -> list[dict[str, Any]]:
    """Tokens per second of every case in bfloat16, one engine at a time, in another order in every repeat."""
    cases = [case for case in engines if CASES[case].dtype == "bfloat16"]
    wanted = [
        Measured(case, 0.0, many) for many in (CONCURRENCY[:2] if setting.tiny else CONCURRENCY) for case in cases
    ]
    wanted += [Measured(case, 1.0, many) for many in ((1,) if setting.tiny else (1, 8)) for case in SAMPLED]
    tokens = 16 if setting.tiny else TOKENS
    seen: dict[Measured, list[dict[str, float]]] = {one: [] for one in wanted}
    for engine in (engines[case] for case in cases):  # compilers, and the policy's first measurements
        for many in (1, 8, 8, 32):
            engine.ask(list(itertools.islice(itertools.cycle(prompts), many)), greedy(tokens))
    for repeat in range(1 if setting.tiny else REPEATS):
        for one in wanted if repeat % 2 == 0 else reversed(wanted):
            seen[one].append(ask_in_groups(engines[one.case], prompts, one, tokens))
            print(f"{one}: {seen[one][-1]['tokens_per_s']:.0f} tokens/s", flush=True)
    plain = {one: median(seen[one], "tokens_per_s") for one in wanted if one.case == "plain"}
    return [as_row(one, seen[one], plain[one._replace(case="plain")]) for one in wanted]


def ask_in_groups(engine: EngineProcess, prompts: list[list[int]], one: Measured, tokens: int) -> dict[str, float]:
    """Ask all questions, so many at a time; with more requests than questions, some twice."""
    questions = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), one.concurrency)))
    parameters = greedy(tokens) | {"temperature": one.temperature}
    found = []
    for first in range(0, len(questions), one.concurrency):
        found.append(engine.ask(questions[first : first + one.concurrency], parameters, flush=first == 0))
    total = {name: sum(answers[name] for answers in found) for name in ("tokens", "seconds", "rounds")}
    drafted = total["tokens"] - len(questions)  # the first token of an answer comes from its prompt
    length = drafted / total["rounds"] if total["rounds"] else 0.0
    return {"tokens_per_s": total["tokens"] / total["seconds"], "accept_length": length}


def median(found: list[dict[str, float]], name: str) -> float:
    """Of the repeats."""
    return statistics.median(one[name] for one in found)


def as_row(one: Measured, found: list[dict[str, float]], plain: float) -> dict[str, Any]:
    """A row of the result."""
    speeds = sorted(repeat["tokens_per_s"] for repeat in found)
    length = median(found, "accept_length")
    row = one._asdict() | {"tokens_per_s": round(statistics.median(speeds), 1), "times_plain": None}
    row["spread"] = [round(speeds[0], 1), round(speeds[-1], 1)]
    row["times_plain"] = round(statistics.median(speeds) / plain, 2)
    return row | {"accept_length": round(length, 3) if length else None}


def sentences(rows: list[dict[str, Any]]) -> list[str]:
    """One per row."""
    found = []
    for row in rows:
        length = f", accept length {row['accept_length']:.2f}" if row["accept_length"] else ""
        many = "1 request" if row["concurrency"] == 1 else f"{row['concurrency']} requests"
        found.append(
            f"{CASES[row['case']].what}, T = {row['temperature']:g}, {many}: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['times_plain']:.2f}x plain{length}"
        )
    return found
