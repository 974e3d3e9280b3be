"""Step `text`: a real SGLang says with the plugin what it says without drafts: eager, with graphs, with overlap.

The target and the EAGLE-3 head are the tiny float32 models of the tests, whose drafts are accepted now and then. Every
engine gets the same requests, one engine after the other. Tokens per second are those of a model that takes next to no
time: they show what a round costs beside the forwards.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_case import CASES, asks, environment, flags
from benchmarks.gpu.model_process import OTHERS, SERVES, serving
from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.kernels import loader

ROOT = Path(__file__).resolve().parents[2]
TINY_CASES = ("plain", "overlap")
LIMIT = 600.0  # seconds for a start, and for an answer
VOCABULARY, HEADS = 512, 8  # SGLang's kernels copy rows of whole 16 bytes
LINES = r"eagle-plugin: (?:the self-test of|\d+ (?:CUDA|emulated) graphs)[^\n]*"


def run(setting: Setting) -> dict[str, Any]:
    """Ask every engine; StepError where the plugin does not serve, or says something else."""
    need_modules("sglang", "tokenizers")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        # No result of an earlier self-test, but the kernels that are built.
        loader.cache_dir().mkdir(parents=True, exist_ok=True)
        (folder / "cache").mkdir()
        (folder / "cache" / loader.cache_dir().name).symlink_to(loader.cache_dir())
        plain: dict[str, Any] = {}
        seeded: list[list[int]] = []
        for case in TINY_CASES if setting.tiny else CASES:
            found, log = ask(case, folder, setting)
            plain = plain or found["asks"]
            row = {"case": case, "what": CASES[case].what} | compare(found, plain)
            row["lines"] = re.findall(LINES, log)
            keep_records(folder / "cache/selftest", setting.logs)
            rows.append(row)
            print(json.dumps(row), flush=True)
            setting.keep({"dtype": "float32", "rows": rows})
            if CASES[case].plugin:
                check(row, log)
                seeded = seeded or found["asks"]["seeds"]["text"]
                if found["asks"]["seeds"]["text"] != seeded:
                    raise StepError(f"{row['what']}: seeded text is not that of the first engine with the plugin")
    return {"dtype": "float32", "rows": rows, "summary": [as_sentence(row) for row in rows]}


def keep_records(records: Path, logs: Path | None) -> None:
    """What the self-tests of these engines found goes to the logs."""
    if logs is not None and records.exists():
        shutil.copytree(records, logs / records.name, dirs_exist_ok=True)


def make_models(folder: Path) -> None:
    """Write the target and its head."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from bigram_models import bigram_eagle3_head, bigram_target

    bigram_target(folder / "target", heads=HEADS, vocab=VOCABULARY)
    bigram_eagle3_head(folder / "head", folder / "target")


def ask(case: str, folder: Path, setting: Setting) -> tuple[dict[str, Any], str]:
    """Start the engine of a case and ask it; its answers and its log. StepError when it does not answer."""
    more, given = environment(case, setting.on_gpu, folder / "cache"), flags(case, folder, setting.on_gpu)
    with serving(CASES[case], "sglang", given, more, folder / f"{case}.log") as engine:
        found: dict[str, Any] = {"start_seconds": engine.wait_for_start(LIMIT), "asks": {}}
        for name, one in asks(setting.tiny):
            if case != "engine" or one.text_is_plain:  # SGLang's own sampled verification needs FlashInfer
                answers = engine.ask_each(one.prompts, one.parameters, LIMIT)
                found["asks"][name] = answers | {"text_is_plain": one.text_is_plain}
        return found, engine.log()


def compare(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """How many texts are those of plain decoding, the accept length, and tokens per second of one and of 8 requests."""
    asked = found["asks"]
    pairs = [
        (name, number, text, wanted)
        for name, one in asked.items()
        if one["text_is_plain"]
        for number, (text, wanted) in enumerate(zip(one["text"], plain[name]["text"], strict=True))
    ]
    wrong = [f"{name} {number}" for name, number, text, wanted in pairs if text != wanted]
    rounds = sum(one["rounds"] for one in asked.values())
    # The first token of an answer comes from its prompt.
    tokens = sum(one["tokens"] - len(one["text"]) for one in asked.values())
    speeds = {name: round(asked[name]["tokens"] / asked[name]["seconds"], 1) for name in ("one", "batch")}
    return {
        "texts": len(pairs),
        "equal": len(pairs) - len(wrong),
        "different": wrong,
        "accept_length": round(tokens / rounds, 3) if rounds else None,
        "tokens_per_s": speeds,
        "start_seconds": round(found["start_seconds"], 1),
    }


def check(row: dict[str, Any], log: str) -> None:
    """StepError when the engine's own worker served, or a text is another one."""
    # A worker whose self-test failed in the real round hands over after it has logged that it serves.
    reason = re.findall(OTHERS, log)
    if reason or SERVES not in log:
        raise StepError(f"{row['what']}: the plugin does not serve: {reason[0] if reason else 'the log has no reason'}")
    if row["different"]:
        raise StepError(
            f"{row['what']}: {len(row['different'])} of {row['texts']} texts are not those of plain decoding, first "
            f"{row['different'][0]}"
        )
    if not (row["accept_length"] or 0) > 1.2:
        raise StepError(f"{row['what']}: the accept length is {row['accept_length']}, so equal text proves nothing")


def as_sentence(row: dict[str, Any]) -> str:
    """A row as a sentence."""
    speeds = row["tokens_per_s"]
    length = f", accept length {row['accept_length']:.2f}" if row["accept_length"] else ""
    return (
        f"{row['what']}: {row['equal']} of {row['texts']} texts equal{length}, {speeds['one']:.0f} tokens/s for one "
        f"request, {speeds['batch']:.0f} for 8"
    )
