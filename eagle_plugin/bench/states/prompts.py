"""The sets of prompts on which states are compared: the user's held-out ones, standard sets, and the shipped ones."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.bench.prompt_kinds import questions_of
from eagle_plugin.bench.questions import Question
from eagle_plugin.learning.data.sources.prompts import Prompt, read_prompts
from eagle_plugin.learning.data.sources.sets import SETS, eval_prompts

HELD_OUT, SHIPPED = "held-out", "shipped"
SET_NAMES = (*SETS, SHIPPED)
TokenCounter = Callable[[Question], int]


class PromptSet(NamedTuple):
    """One set: what the servers are asked, and what was left out of it."""

    questions: list[Question]
    longest: int  # tokens of the longest prompt, the chat template left out
    left_out: dict[str, int]  # how many prompts, by reason

    @property
    def sha256(self) -> str:
        """Of the questions in their order: two runs asked the same if these are equal."""
        content = [question.messages or question.prompt for question in self.questions]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prompt_sets(names: Sequence[str], own: Path | None, target: Path, limit: int, longest: int) -> dict[str, PromptSet]:
    """The sets by name, the user's first; `limit` prompts of each, none longer than `longest` tokens.

    Raises:
        DataError: the file cannot be read, or a set cannot be downloaded.
        ValueError: a set has no prompt that can be asked.
    """
    tokens = _token_counter(target)
    sets: dict[str, PromptSet] = {}
    if own is not None:
        questions, left_out = own_questions(own)
        sets[HELD_OUT] = _short(questions, left_out, tokens, limit, longest)
        if not sets[HELD_OUT].questions:
            raise ValueError(
                f"--prompts {own} has no prompt that can be asked ({_reasons(sets[HELD_OUT].left_out)}); "
                f"give conversations of at most {longest} tokens"
            )
    for name in names:
        if name == SHIPPED:
            questions = questions_of("mixed", target)
        else:
            found = enumerate(eval_prompts(name))
            questions = [Question(id=f"{name}-{number}", group=name, prompt=text) for number, text in found]
        sets[name] = _short(questions, Counter(), tokens, limit, longest)
    if not sets:
        raise ValueError("no prompts were named; give --prompts FILE or --sets")
    if empty := [name for name, found in sets.items() if not found.questions]:
        raise ValueError(f"--sets {empty[0]}: no prompt is within {longest} tokens; name another set")
    return sets


def own_questions(path: Path) -> tuple[list[Question], Counter[str]]:
    """The held-out prompts of a file of `eagle-plugin data prepare`, all of them where none has split val.

    A conversation is asked up to the first place where the target answers. Returns the questions, and how many prompts
    were left out by reason.
    """
    prompts = list(read_prompts(path))
    held_out = [prompt for prompt in prompts if prompt.split == "val"]
    questions: list[Question] = []
    left_out: Counter[str] = Counter()
    if held_out:
        left_out["of split train"] = len(prompts) - len(held_out)
    for number, prompt in enumerate(held_out or prompts):
        question = _question(prompt, f"{HELD_OUT}-{number}")
        if question is None:
            left_out["without text"] += 1
        else:
            questions.append(question)
    return questions, +left_out


def _question(prompt: Prompt, name: str) -> Question | None:
    if prompt.messages is None:
        return Question(id=name, group=HELD_OUT, prompt=prompt.prompt) if prompt.prompt else None
    end = next((i for i, turn in enumerate(prompt.messages) if turn["role"] == "assistant"), len(prompt.messages))
    turns = [{key: turn[key] for key in ("role", "content")} for turn in prompt.messages[:end] if turn.get("content")]
    if not turns or turns[-1]["role"] != "user":
        return None
    text = turns[-1]["content"]
    return Question(id=name, group=HELD_OUT, prompt=text, messages=turns if len(turns) > 1 else None)


def _short(
    questions: Sequence[Question], left_out: Counter[str], tokens: TokenCounter, limit: int, longest: int
) -> PromptSet:
    kept: list[Question] = []
    counts: list[int] = []
    for question in questions:
        if len(kept) == limit:
            break
        count = tokens(question)
        if count > longest:
            left_out[f"longer than {longest} tokens"] += 1
        else:
            kept.append(question)
            counts.append(count)
    return PromptSet(kept, max(counts, default=0), dict(left_out))


def _token_counter(target: Path) -> TokenCounter:
    """A function that counts the tokens of a question; without a tokenizer.json, its characters: never fewer."""
    path = target / "tokenizer.json"
    if not path.is_file():
        return lambda question: len(_text(question))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda question: len(tokenizer.encode(_text(question), add_special_tokens=False).ids)


def _text(question: Question) -> str:
    return "\n".join(str(turn["content"]) for turn in question.messages) if question.messages else question.prompt


def _reasons(left_out: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "the file is empty"
