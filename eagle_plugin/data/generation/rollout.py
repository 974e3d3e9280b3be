"""Plays one prompt against a target: every user turn is answered by the target itself, and each answer is a row."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_plugin.data.generation.endpoints import Answer, Endpoint, Refused
from eagle_plugin.data.generation.journal import turn_id
from eagle_plugin.data.rows import TokenRow
from eagle_plugin.data.sources.prompts import Prompt

SHORTEST = 8  # tokens of an answer worth keeping
LOOP_TAIL = 256  # tokens at the end of an answer that are looked at
LOOP_TAIL_MIN = 64  # an answer half as long again cannot be told from honest repetition
LOOP_PERIOD = 32
_SHAPE_PROMPTS = ("chat_template_kwargs", "reasoning_effort")  # of the recorded request: templates read them


@dataclass(frozen=True)
class Skip:
    """A turn without a row, which ends its conversation."""

    turn: int
    kind: str  # what the summary counts by
    reason: str


@dataclass(frozen=True)
class Played:
    """The rows of one conversation, in order, and what ended it early."""

    rows: list[TokenRow]
    skip: Skip | None = None


def loops(ids: Sequence[int]) -> bool:
    """Whether the last 256 tokens (of shorter answers the last half, if 64 or more) repeat with a period of 1 to 32."""
    tail = ids[-LOOP_TAIL:] if len(ids) >= LOOP_TAIL else ids[len(ids) // 2 :]
    return len(tail) >= LOOP_TAIL_MIN and any(tail[p:] == tail[:-p] for p in range(1, LOOP_PERIOD + 1))


def deal_temperature(prompt: Prompt, temperatures: Sequence[float] | None) -> float:
    """The temperature that a prompt is played at: dealt by the hash of its id, or its own if none are given.

    A prompt without one of its own is dealt 0 or 1.
    """
    own = prompt.sampling.get("temperature")
    if not temperatures and own is not None:
        return float(own)
    choices = temperatures or (0.0, 1.0)
    return choices[int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:8], "big") % len(choices)]


async def play(
    prompt: Prompt,
    endpoint: Endpoint,
    *,
    temperature: float,
    max_tokens: int,
    is_private: Callable[[str], bool] | None = None,
) -> Played:
    """Ask for every turn of the prompt in order and judge the answers.

    Recorded assistant turns are replaced by what the target says. The conversation ends early with a `Skip` when an
    answer is refused, too short, looping or private, or calls a tool for which no result was recorded.

    Raises:
        EndpointDead: ask another endpoint.
        Refused: for now (`final` is false): the prompt may be played another day.
        DataError: the endpoint gives no token ids.
    """
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    chat_sampling = {**sampling, **{name: item for name, item in prompt.sampling.items() if name in _SHAPE_PROMPTS}}
    rows: list[TokenRow] = []

    def judge(answer: Answer) -> Skip | None:
        if len(answer.response_ids) < SHORTEST:
            return Skip(len(rows), "too short", f"the answer has fewer than {SHORTEST} tokens")
        if loops(answer.response_ids):
            return Skip(len(rows), "looping", "the answer repeats itself")
        if is_private is not None and is_private(answer.text):
            return Skip(len(rows), "private", "the answer holds private data")
        rows.append(
            TokenRow(
                id=turn_id(prompt.id, len(rows)),
                source=prompt.source,
                split=prompt.split,
                prompt_ids=answer.prompt_ids,
                response_ids=answer.response_ids,
                finish=answer.finish,
                temperature=temperature,
            )
        )
        return None

    try:
        if not prompt.messages:
            raw = prompt.prompt if prompt.prompt is not None else prompt.prompt_ids
            return Played(rows, judge(await endpoint.complete(raw or "", sampling)))
        history: list[dict[str, Any]] = []
        waiting = deque(prompt.messages)
        while waiting:
            message = waiting.popleft()
            if message["role"] == "assistant":
                continue
            history.append(message)
            answer_is_due = not waiting or waiting[0]["role"] in ("assistant", "tool")
            while answer_is_due:
                answer = await endpoint.chat(history, prompt.tools, chat_sampling)
                if skip := judge(answer):
                    return Played(rows, skip)
                calls = answer.message.get("tool_calls") or []
                results = _take_results(calls, waiting)
                if results is None:
                    return Played(rows, Skip(len(rows), "tools differ", "the recorded results are for other calls"))
                history += [answer.message, *results]
                answer_is_due = bool(calls)
    except Refused as error:
        if not error.final:
            raise
        return Played(rows, Skip(len(rows), "refused", str(error)))
    return Played(rows)


def _take_results(calls: Sequence[dict[str, Any]], waiting: deque[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Take the recorded result of every generated call out of `waiting`; None if they do not belong together."""
    if waiting and waiting[0]["role"] == "assistant":  # the recorded turn that this answer replaces
        waiting.popleft()
    found: list[dict[str, Any]] = []
    while waiting and waiting[0]["role"] == "tool":
        found.append(waiting.popleft())
    if bool(calls) != bool(found):
        return None
    results = []
    for call in calls:
        match = next((result for result in found if result.get("name") == call["function"]["name"]), None)
        if match is None:
            return None
        found.remove(match)
        results.append({**match, "tool_call_id": call.get("id")})
    return results
