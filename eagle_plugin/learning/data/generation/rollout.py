"""One rollout: the target answers every user turn of one prompt, and each answer becomes a token row."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_plugin.learning.data.answer_faults import answer_fault
from eagle_plugin.learning.data.generation.endpoints import (
    GeneratedAnswer,
    RequestRefused,
    TargetEndpoint,
    asking_for_features,
)
from eagle_plugin.learning.data.rows import TokenRow, turn_id
from eagle_plugin.learning.data.sources.prompts import Prompt

# Parts of the recorded request that chat templates read, and that are sent again for that reason.
_TEMPLATE_PARAMETERS = ("chat_template_kwargs", "reasoning_effort")
_OTHER_CALLS = "tools differ", "the recorded results are for other calls"
_NO_CALLS = (
    "no tool call",
    "results of tools are recorded here, and the server returned no call; if the target writes calls, start the server "
    "with --tool-call-parser",
)


@dataclass(frozen=True)
class SkippedTurn:
    """A turn without a row, which ends its conversation."""

    turn: int
    kind: str  # the summary counts skipped turns by kind
    reason: str


@dataclass(frozen=True)
class Rollout:
    """The rows of one conversation, in order, and the turn that ended it early, if one did."""

    rows: list[TokenRow]
    skip: SkippedTurn | None = None


def assign_temperature(prompt: Prompt, temperatures: Sequence[float] | None) -> float:
    """The temperature at which a prompt is answered.

    One of `temperatures`, chosen by the hash of the prompt's id. Without `temperatures` it is the prompt's own one; a
    prompt that has none gets 0 or 1, by the same hash.
    """
    own = prompt.sampling.get("temperature")
    if not temperatures and own is not None:
        return float(own)
    choices = temperatures or (0.0, 1.0)
    return choices[int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:8], "big") % len(choices)]


async def run_rollout(
    prompt: Prompt,
    endpoint: TargetEndpoint,
    *,
    temperature: float,
    max_tokens: int,
    is_private: Callable[[str], bool] | None = None,
    collects: bool = False,
    drafts: bool = True,
) -> Rollout:
    """Ask for every turn of the prompt in order, and keep the answers that pass the checks.

    Recorded assistant turns are replaced by answers of the target. The conversation ends early with a `SkippedTurn` if
    an answer is refused, too short, looping or private, or calls a tool for which no result was recorded. collects: the
    server is asked to store the hidden states of each answer under the id of its row; drafts: and to draft meanwhile.

    Raises:
        EndpointDead: another endpoint must be asked.
        RequestRefused: the request failed this time (`final` is false); a later run may ask again.
        DataError: the endpoint returns no token ids.
    """
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    recorded = {name: item for name, item in prompt.sampling.items() if name in _TEMPLATE_PARAMETERS}
    rows: list[TokenRow] = []

    def check_answer(answer: GeneratedAnswer) -> SkippedTurn | None:
        """Keep the answer as a row, or return why it is dropped."""
        if fault := answer_fault(answer.response_ids):
            return SkippedTurn(len(rows), *fault)
        if is_private is not None and is_private(answer.text):
            return SkippedTurn(len(rows), "private", "the answer holds private data")
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

    def asked() -> dict[str, Any]:
        """The sampling of the next turn, and what it becomes."""
        if not collects:
            return sampling
        name = turn_id(prompt.id, len(rows))
        return sampling | asking_for_features(name, prompt.source, prompt.split, drafts=drafts)

    try:
        if not prompt.messages:
            raw = prompt.prompt if prompt.prompt is not None else prompt.prompt_ids
            return Rollout(rows, check_answer(await endpoint.complete(raw or "", asked())))
        history: list[dict[str, Any]] = []
        remaining = deque(prompt.messages)
        while remaining:
            message = remaining.popleft()
            if message["role"] == "assistant":
                continue
            history.append(message)
            answer_is_due = not remaining or remaining[0]["role"] in ("assistant", "tool")
            while answer_is_due:
                answer = await endpoint.chat(history, prompt.tools, {**asked(), **recorded})
                if skip := check_answer(answer):
                    return Rollout(rows, skip)
                calls = answer.message.get("tool_calls") or []
                results = _take_results(calls, remaining)
                if results is None:
                    # Without tools in the request no parser looks for calls.
                    why = _NO_CALLS if prompt.tools and not calls else _OTHER_CALLS
                    return Rollout(rows, SkippedTurn(len(rows), *why))
                history += [answer.message, *results]
                answer_is_due = bool(calls)
    except RequestRefused as error:
        if not error.final:
            raise
        return Rollout(rows, SkippedTurn(len(rows), "refused", str(error)))
    return Rollout(rows)


def _take_results(calls: Sequence[dict[str, Any]], remaining: deque[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Take the recorded tool results out of `remaining`, one per generated call; None if they do not match."""
    if remaining and remaining[0]["role"] == "assistant":  # the recorded turn that this answer replaces
        remaining.popleft()
    found: list[dict[str, Any]] = []
    while remaining and remaining[0]["role"] == "tool":
        found.append(remaining.popleft())
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
