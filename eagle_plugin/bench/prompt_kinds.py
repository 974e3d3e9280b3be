"""Chooses the questions of a measurement: kinds of prompts, and how long their answers may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Literal, get_args

from eagle_plugin.bench.closed_loop import Ask
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.models.shipped import question_files

PromptKind = Literal["mixed", "chat", "code", "maths", "long"]
PROMPT_KINDS: tuple[PromptKind, ...] = get_args(PromptKind)
LONG_TOKENS = 2000  # of text before the question of a long prompt
PROMPT_TOKENS = {"long": 2150}  # the most tokens of one prompt, the chat template included
USUAL_PROMPT_TOKENS = 200
DRAFT_SLOTS = 64 + 127  # one tree, and the unused end of a block of vLLM
LONG_TASKS = ("Summarise the text above in three sentences.", "Show a short Python program that uses what is above.")
# The shortest and the longest limit of an answer, in parts of what `select_asks` is given. With few lengths, requests
# that begin together would end in the same step of plain decoding, and one prefill would serve all that follow them.
SHORTEST, LONGEST = 0.5, 1.25


def questions_of(kind: str, target: Path) -> list[Question]:
    """All questions of that kind, always in the same order; `target` has the tokenizer that measures long ones.

    ValueError if the target has no tokenizer.json.
    """
    if kind == "long":
        return long_questions(target)
    every = [question for row in assign_rounds(read_questions(question_files())) for question in row]
    return every if kind == "mixed" else [question for question in every if question.group == kind]


def long_questions(target: Path, tokens: int = LONG_TOKENS) -> list[Question]:
    """Questions about consecutive parts, of `tokens` tokens each, of the language reference that Python ships."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    path = target / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"prompts long: {path} is missing, it counts the tokens; copy the target's checkpoint again")
    text = "\n".join(topics[name] for name in sorted(topics))
    offsets = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).offsets
    parts = [text[offsets[i][0] : offsets[i + tokens - 1][1]] for i in range(0, len(offsets) - tokens + 1, tokens)]
    return [
        Question(id=f"long-{number}", group="long", prompt=f"{part}\n\n{task}")
        for number, (part, task) in enumerate(zip(parts, cycle(LONG_TASKS), strict=False))
    ]


def select_asks(questions: Sequence[Question], first: int, count: int, max_tokens: int) -> list[Ask]:
    """`count` questions from number `first` on, starting over at the end.

    The answers' limits are spread evenly from `SHORTEST` to `LONGEST` times `max_tokens`. They are a function of the
    position, so that every server gets the same; neighbours differ.
    """
    return [
        Ask(questions[place % len(questions)], max(2, round(max_tokens * _length(place))))
        for place in range(first, first + count)
    ]


def _length(place: int) -> float:
    """The multiples of the golden ratio, modulo 1: any number of consecutive ones is spread evenly."""
    return SHORTEST + (LONGEST - SHORTEST) * (place * (math.sqrt(5) - 1) / 2 % 1)


def tokens_per_request(kind: str, max_tokens: int) -> int:
    """An upper bound of the cache slots of one request."""
    return PROMPT_TOKENS.get(kind, USUAL_PROMPT_TOKENS) + round(max_tokens * LONGEST) + DRAFT_SLOTS
