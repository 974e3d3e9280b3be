"""Converts messages in the dialects of many tools to one form: role, content, tool calls, reasoning."""

from __future__ import annotations

import json
from typing import Any

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")


class Unusable(Exception):
    """A well-formed record that cannot become a prompt; the message is the reason by which such records are counted."""


def normalise_messages(messages: list[Any], keep_responses: bool) -> list[dict[str, Any]]:
    """Messages with only the keys role, content, name, tool_calls, tool_call_id and reasoning_content.

    Roles become system, user, assistant or tool. Text parts are joined; tool-call arguments become a dict.
    Turns before the first user turn are removed, except system turns: no prompt leads to them. Assistant turns at the
    end are removed too, unless `keep_responses`. Those between user turns are kept: they mark where the target answers.

    Raises:
        Unusable: with the reason.
    """
    turns = [_normalise_message(message) for message in messages]
    start = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if start is None:
        raise Unusable("no user turn")
    turns = [turn for turn in turns[:start] if turn["role"] == "system"] + turns[start:]
    while turns[-1]["role"] == "assistant" and not keep_responses:
        turns.pop()
    _name_tool_results(turns)
    return turns


def _normalise_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Unusable("malformed message")
    recorded_role = message.get("role", message.get("from"))
    role = ROLES.get(recorded_role.lower()) if isinstance(recorded_role, str) else None
    if role is None:
        raise Unusable("unknown role")
    turn: dict[str, Any] = {"role": role}
    content = _join_parts(message.get("content", message.get("value")))
    calls = [_normalise_call(call) for call in _recorded_calls(message.get("tool_calls"))]
    calls += [_normalise_call(call) for call in _recorded_calls(message.get("function_call"))]
    if recorded_role == "function_call" and content is not None:
        calls, content = [_normalise_call(call) for call in _recorded_calls(content)], None
    if content is not None:
        turn["content"] = content
    if calls:
        turn["tool_calls"] = calls
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        turn["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            turn[key] = message[key]
    if role in ("user", "tool") and content is None:
        raise Unusable("empty turn")
    if role == "user" and not str(content).strip():
        raise Unusable("empty turn")
    return turn


def _join_parts(content: Any) -> str | None:
    """Content as one string; Unusable if a part is not text, because the target may not read such parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable("malformed message")
    pieces = []
    for part in content:
        if isinstance(part, str):
            pieces.append(part)
        elif not isinstance(part, dict):
            raise Unusable("malformed message")
        elif part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            pieces.append(part["text"])
        elif part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            pieces.append(part["refusal"])
        else:
            raise Unusable("multimodal content")
    return "\n".join(pieces)


def _recorded_calls(value: Any) -> list[Any]:
    """The calls of a turn: a list, one call alone, or either as JSON text, as some recorders store it.

    Raises:
        Unusable: it is something else.
    """
    if isinstance(value, str):
        value = decode_text(value, "malformed tool call")
    if not value:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise Unusable("malformed tool call")
    return value


def decode_text(text: str, reason: str) -> Any:
    """The JSON value in a text, None for a blank one. Raises Unusable with the reason if it is not JSON."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise Unusable(reason) from error


def _normalise_call(call: Any) -> dict[str, Any]:
    call = decode_text(call, "malformed tool call") if isinstance(call, str) else call
    # Without a part of its own for the function, the call is the function.
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("malformed tool call")
    arguments = function.get("arguments") or {}
    arguments = _decode(arguments) if isinstance(arguments, str) else arguments
    normal = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **normal} if isinstance(call.get("id"), str) else normal


def _decode(text: str) -> Any:
    """The JSON value in a string, or the string itself if it is not JSON: templates render what the model wrote."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _name_tool_results(turns: list[dict[str, Any]]) -> None:
    """Give each tool result the name of its call: a rollout matches results to new calls by name."""
    names: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls", []):
            names[call.get("id", "")] = call["function"]["name"]
        if turn["role"] == "tool" and "name" not in turn and turn.get("tool_call_id") in names:
            turn["name"] = names[turn["tool_call_id"]]
