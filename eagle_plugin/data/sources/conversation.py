"""Messages as recorded by many tools, brought to one form: role, content, tool calls, reasoning."""

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
    """A record that is well-formed but cannot become a prompt; the message is the reason that is counted."""


def normalise_messages(messages: list[Any], keep_responses: bool) -> list[dict[str, Any]]:
    """Messages with the keys role, content, name, tool_calls, tool_call_id and reasoning_content, and no others.

    Roles become system, user, assistant or tool; text parts one string; tool-call arguments a dict. An assistant
    turn before the first user turn goes, since no prompt leads to it. Assistant turns at the end go too, unless
    `keep_responses`; those between user turns stay, for they mark where the target answers.

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
    said = message.get("role", message.get("from"))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise Unusable("unknown role")
    turn: dict[str, Any] = {"role": role}
    content = _join_parts(message.get("content", message.get("value")))
    calls = [_normalise_call(call) for call in _listed(message.get("tool_calls"))]
    if isinstance(message.get("function_call"), dict):
        calls.append(_normalise_call({"function": message["function_call"]}))
    if said == "function_call" and content is not None:
        calls, content = [_normalise_call({"function": _decode(content)})], None
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
    """Content as one string; parts that are not text make the row unusable, since the target may not see them."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable("malformed message")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise Unusable("malformed message")
        elif part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            raise Unusable("multimodal content")
    return "\n".join(texts)


def _normalise_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("malformed tool call")
    arguments = function.get("arguments") or {}
    arguments = _decode(arguments) if isinstance(arguments, str) else arguments
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _decode(text: str) -> Any:
    """JSON in a string, or the string itself: templates print what a model wrote, well-formed or not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _name_tool_results(turns: list[dict[str, Any]]) -> None:
    """Give each tool result the name of the call that it answers, so that a replay can match it by name."""
    names: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls", []):
            names[call.get("id", "")] = call["function"]["name"]
        if turn["role"] == "tool" and "name" not in turn and turn.get("tool_call_id") in names:
            turn["name"] = names[turn["tool_call_id"]]
