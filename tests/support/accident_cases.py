"""One working call of every sub-command of `eagle-plugin`, with the places that an accident can take away from it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from states_reports import states_report
from tiny_models import tiny_eagle3_head, tiny_llama

from eagle_plugin import cli
from eagle_plugin.common.deploy_folder import ANSWER, REQUEST, SERVER
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.report import MARK, Expected, PolicyReport

TRAIN = """\
target: {target}
data: {{store: {store}}}
budget: {{updates: 1}}
batch_tokens: 128
phases: [{{steps: 1}}]
eval_tokens: 0
"""
JOB = """\
target: {target}
prompts: {{files: [{chats}], privacy: "off"}}
vocabulary: 64
train: {{base: {{budget: {{updates: 1}}}}}}
evaluate: []
benchmark: false
package: false
"""


class Case(NamedTuple):
    """A call that works if nothing is wrong with its places.

    args: the arguments after the sub-command; {name} is the path of a place, or of a good input that stays good.
    places: name -> kind: "file", "folder" and "head" (a draft head's folder) are read, of a "config" folder only
        config.json; "new file" and "new folder" are written; "cache" is the user's cache, "stdout" the standard output.
    """

    args: str
    places: dict[str, str]


CAPS = Shape(2, 4, 8)
MODEL = "--target {target} --head {head} --out {out}"
SERVES = {"target": "config", "head": "config", "out": "new folder"}  # the engine reads the rest
# Of a new sub-command: a call that works, and the places that it reads and writes.
CASES = {
    "models list": Case("", {"stdout": "stdout"}),
    "models get": Case("smollm2-135m-instruct", {"cache": "cache"}),
    "models path": Case("smollm2-135m-instruct", {"cache": "cache"}),
    "capture": Case("export {capture} --out {out}", {"capture": "folder", "out": "new file"}),
    "check": Case("{target} {head}", {"target": "folder", "head": "head"}),
    "data builtin": Case(
        "--recorded --accept-terms sharegpt --limit 2 --out {out}", {"out": "new file", "cache": "cache"}
    ),
    "data set": Case("sharegpt --path {sharegpt} --out {out}", {"sharegpt": "file", "out": "new file"}),
    "data prepare": Case("{chats} --privacy off --out {out}", {"chats": "file", "out": "new file"}),
    "data generate": Case("{prompts} --endpoint {url} --out {out}", {"prompts": "file", "out": "new file"}),
    "data render": Case(
        "{prompts} --target {target} --out {out}", {"prompts": "file", "target": "folder", "out": "new file"}
    ),
    "data vocabulary": Case(
        "{rows} --target {target} --size 64 --out {out}", {"rows": "file", "target": "config", "out": "new file"}
    ),
    "data features": Case(
        "{rows} --target {target} --store {out}", {"rows": "file", "target": "folder", "out": "new folder"}
    ),
    "data collect": Case(
        "{prompts} --endpoint {url} --target {target} --store {store} --out {out}",
        {"prompts": "file", "out": "new file"},
    ),
    "data verify": Case("{store}", {"store": "folder"}),
    "optimize": Case("{job} --out {out} --until prompts", {"job": "file", "out": "new folder"}),
    "train": Case(
        "{recipe} --out {out} --set target={target} --set data.store={store}",
        {"recipe": "file", "target": "folder", "store": "folder", "out": "new folder"},
    ),
    "eval": Case(
        "{target} {head} --rows {rows} --tokens 8 --temperatures 0 --json {out}",
        {"target": "folder", "head": "folder", "rows": "file", "out": "new file", "cache": "cache"},
    ),
    "export": Case(
        "{head} {out} --target {target}", {"head": "head", "target": "folder", "out": "new folder"}
    ),
    "demo": Case(f"{MODEL} --prompts {{questions}}", {**SERVES, "questions": "file"}),
    "serve": Case(MODEL, SERVES),
    "bench": Case(MODEL, SERVES),
    "bench-serving": Case(f"{MODEL} --prompts chat", SERVES),
    "benchmark": Case(
        "{target} --head {head} --prompts {prompts} --sets --out {out}", {**SERVES, "prompts": "file"}
    ),
    "report": Case("{benchmark} --out {out}", {"benchmark": "folder", "out": "new folder", "stdout": "stdout"}),
    "package": Case(
        "{target} {head} --out {out}", {"target": "config", "head": "folder", "out": "new folder", "stdout": "stdout"}
    ),
    "deploy": Case(
        "{head} --server {url} --folder {served} --no-watch --json", {"head": "folder", "served": "folder"}
    ),
    "watch": Case("{url} --head {package} --once", {"package": "folder"}),
    "explain": Case("{log} --picture {out}", {"log": "file", "out": "new file", "stdout": "stdout"}),
    "selftest": Case(
        "--device cpu --again --model-shape heads=2,kv_heads=1,head_dim=16,vocabulary=200,draft_vocabulary=130,width=8,"
        "steps=2,topk=4,dtype=float32",
        {"cache": "cache", "stdout": "stdout"},
    ),
    "version": Case("", {"stdout": "stdout"}),
    "doctor": Case("", {"stdout": "stdout"}),
    "new-head": Case("{target} {out}", {"target": "folder", "out": "new folder"}),
}  # fmt: skip


def sub_commands() -> list[str]:
    """Every sub-command of the real parser, such as "data prepare"."""
    return sorted(_leaves(cli._parser()))


def _leaves(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[str]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not actions:
        yield prefix.strip()
    for action in actions:
        for name, inner in action.choices.items():
            yield from _leaves(inner, f"{prefix} {name}")


def make_inputs(folder: Path) -> dict[str, Path]:
    """Write good inputs, and a feature store with the command that makes one; returns them by name."""
    target = tiny_llama(folder / "target" / "model")
    made = {"target": target, "head": tiny_eagle3_head(folder / "head" / "model", target)}
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    answer = {"role": "assistant", "content": "Because the air scatters blue light more than red light."}
    rows = [
        {"id": f"a-{k}#0", "source": "a", "prompt_ids": [5, 6, 7 + k], "response_ids": list(range(40, 52)),
         "finish": "length", "split": "train"}
        for k in range(6)
    ]  # fmt: skip
    files: dict[str, list[Any]] = {
        "chats": [chat],
        "prompts": [{"id": "a-1", "source": "a", "messages": [*chat["messages"], answer]}],
        "rows": rows,
        "questions": [{"id": "q", "group": "g", "prompt": "Why is the sky blue?"}],
    }
    for name, values in files.items():
        made[name] = _write(folder / name / "lines.jsonl", "".join(json.dumps(value) + "\n" for value in values))
    made["store"] = folder / "store" / "features"
    args = ["data", "features", str(made["rows"]), "--target", str(target), "--store", str(made["store"])]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main(args)
    if code:
        raise RuntimeError("the feature store for the accidents was not made")
    report = PolicyReport("auto", CAPS, CAPS, 1, 10, expected={PLAIN: Expected(0.1, 1.0), CAPS: Expected(0.2, 2.5)})
    made["log"] = _write(folder / "log" / "server.log", f"eagle-plugin: policy; {MARK}{report.as_json()}\n")
    made["benchmark"] = _write(folder / "benchmark" / "states.json", states_report().model_dump_json()).parent
    captured = {"v": 1, "id": "a", "time": 0.0, "request": chat, "response": {"text": answer["content"]}}
    name = "capture-20261123T000000-host-1-000001.jsonl"
    made["capture"] = _write(folder / "capture" / "answers" / name, json.dumps(captured) + "\n").parent
    rows = [{"state": "trained", "prompts": "a", "accept_length": {"median": 2.0}}]
    package = json.dumps({"measured": {"benchmark": {"rows": rows}}})
    made["package"] = _write(folder / "package" / "package.json", package).parent
    serves = {"engine": "sglang", "target": str(target), "head": str(made["head"]), "algorithm": "EAGLE3"}
    made["served"] = _write(folder / "served" / SERVER, json.dumps(serves | {"refuses": ""})).parent
    made["recipe"] = _write(folder / "recipe" / "recipe.yaml", TRAIN.format(**made))
    made["job"] = _write(folder / "job" / "job.yaml", JOB.format(**made))
    opening = {"from": "human", "value": "Why is the sky blue in the evening?"}
    dialogues = [{"conversations": [opening, {"from": "gpt", "value": "The air scatters blue light. " * 4}]}]
    made["sharegpt"] = _write(folder / "sharegpt" / "sharegpt.json", json.dumps(dialogues))
    return made


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def _answer(served: Any) -> None:
    """What a server does that takes the head."""
    request = json.loads((served._folder / REQUEST).read_text())
    (served._folder / ANSWER).write_text(json.dumps({"id": request["id"], "error": "", "seconds": 0.1}))


@contextlib.contextmanager
def stand_ins(place: str, made: dict[str, Path]) -> Iterator[None]:
    """What would be downloaded, and an engine that writes a log and ends, unless it is what the accident takes away."""
    from eagle_plugin.bench.engines import ENGINES
    from eagle_plugin.learning.data import builtin
    from eagle_plugin.learning.deploy.server import ServedHead

    command = [sys.executable, "-c", "print('no engine ' * 100)"]
    engine = dataclasses.replace(ENGINES["sglang"], command=lambda spec, port: command)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(ENGINES, {"sglang": engine}))
        stack.enter_context(mock.patch.object(ServedHead, "_wake", _answer))
        if place != "cache":
            stack.enter_context(mock.patch.object(builtin, "cached_file", lambda *_: made["sharegpt"]))
            stack.enter_context(mock.patch.object(builtin, "eval_prompts", lambda *_: []))
        yield
