"""Chooses the prompts of the loop, of one domain: those of the traffic, and held-out ones that are never trained on."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from eagle_plugin.common.atomic_io import inherit_privacy, write_output
from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.data.provenance import of_prompts, read_sources, write_sources
from eagle_plugin.learning.data.rows import TokenRow, format_row
from eagle_plugin.learning.data.sources.builtin_prompts import SOURCES, parsed_modules
from eagle_plugin.learning.data.sources.prompts import Prompt, assign_id_and_split, format_prompt, read_prompts

DOMAIN = "functions of Python's standard library, to be explained"
NAME = "stdlib"
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
VAL_DOCUMENTS = 6  # at the least, of the prompts that are asked: for the learning curve
QUESTION = "Explain what this Python function does.\n\n```python\n{code}\n```"


class LoopError(UserError):
    """A step of the loop cannot start or go on; the sentence says why."""


def choose_prompts(own: Path | None, count: int, held_out: int, target: Path, folder: Path) -> None:
    """Write `folder`/prompts.jsonl, held-out.jsonl and held-out-rows.jsonl; see `write_prompts`."""
    measured = folder / "held-out.jsonl"
    write_prompts(own, count, held_out, folder / "prompts.jsonl", measured)
    write_held_out_rows(measured, target, folder / "held-out-rows.jsonl")


def write_prompts(own: Path | None, count: int, held_out: int, traffic: Path, measured: Path) -> None:
    """Write `count` prompts of the traffic and `held_out` others; both are files of `data prepare`'s form.

    A fiftieth of the traffic is of split val.

    own: a file of prompts; None: questions about the standard library.

    Raises:
        LoopError: there are too few prompts. DataError: the file of own prompts cannot be read.
    """
    prompts = library_prompts() if own is None else own_prompts(own)
    chosen = split_prompts(prompts, count, held_out)
    if chosen is None:
        raise LoopError(
            f"{own or DOMAIN}: found {len(prompts)} different prompts, wanted {count} + {held_out}; "
            f"give more, or less with --count and --held-out (traffic.count and traffic.held_out in a recipe)"
        )
    train, rest = chosen
    val = min(count // 2, max(VAL_DOCUMENTS, count // 50))
    with inherit_privacy(*([] if own is None else [own])):
        write_output(measured, [format_prompt(replace(prompt, split="val")) for prompt in rest])
        write_sources(traffic, {NAME: SOURCES["code"]} if own is None else of_prompts(read_sources(own)))
        write_output(
            traffic,
            [format_prompt(replace(one, split="val" if place < val else "train")) for place, one in enumerate(train)],
        )


def split_prompts(prompts: Sequence[Prompt], count: int, held_out: int) -> tuple[list[Prompt], list[Prompt]] | None:
    """(traffic, held out), without a text in both; None if there are too few. Prompts of split val are held out first.

    The order is that of a hash of the text: the same prompts give the same parts, whatever their order was.
    """
    different = {question_of(prompt): prompt for prompt in prompts}
    order = sorted(different, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    val = [text for text in order if different[text].split == "val"]
    rest = [text for text in order if different[text].split != "val"]
    kept, more = val[:held_out], max(0, held_out - len(val))
    kept, rest = kept + rest[:more], rest[more:]
    if len(kept) < held_out or len(rest) < count:
        return None
    return [different[text] for text in rest[:count]], [different[text] for text in kept]


def question_of(prompt: Prompt) -> str:
    """The text of the user's first turn."""
    return next((turn["content"] for turn in prompt.messages or [] if turn["role"] == "user"), "")


def own_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file that have a user turn, each without what follows its first one."""
    found = []
    for prompt in read_prompts(path):
        if question_of(prompt):
            turns = prompt.messages or []
            end = next(i for i, turn in enumerate(turns) if turn["role"] == "user")
            found.append(replace(prompt, messages=turns[: end + 1], sampling={}))
    return found


def library_prompts() -> list[Prompt]:
    """One question for each public function of the standard library that is 200 to 1,000 characters long."""
    codes = sorted(set(_functions(Path(sysconfig.get_path("stdlib")))))
    prompts = [Prompt("", NAME, messages=[{"role": "user", "content": QUESTION.format(code=code)}]) for code in codes]
    return [replace(assign_id_and_split(prompt, 0.0), split="train") for prompt in prompts]


def _functions(root: Path) -> Iterator[str]:
    for lines, tree in parsed_modules(root, LEFT_OUT):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if 200 < len(code) < 1000 and code.isascii():
                    yield code


def write_held_out_rows(measured: Path, target: Path, rows: Path) -> None:
    """The held-out prompts as token rows without answers, which `eagle-plugin eval` lets the target write."""
    from eagle_plugin.learning.data.target_files import load_tokenizer
    from eagle_plugin.learning.evaluate.responses import chat_ids

    tokenizer = load_tokenizer(target)

    def line(prompt: Prompt) -> str:
        ids = chat_ids(tokenizer, question_of(prompt), (prompt.messages or [])[:-1])
        return format_row(TokenRow(f"{prompt.id}#0", prompt.source, ids, [], "", "val"))

    with inherit_privacy(measured):
        write_output(rows, map(line, read_prompts(measured)))
