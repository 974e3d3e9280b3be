"""Reads requests and answers of OpenAI's /v1/responses as those of chats: texts, items, instructions and tools."""

from __future__ import annotations

from typing import Any

from eagle_plugin.learning.data.sources.answers import RecordedAnswer
from eagle_plugin.learning.data.sources.conversation import Unusable

# A request with one of these continues something that only the server has.
STORED = ("previous_response_id", "conversation", "prompt")


def responses_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat with the same meaning; `normalise_messages` checks them.

    Raises:
        Unusable: a part of the conversation is not in the request, or is not text.
    """
    if any(body.get(key) is not None for key in STORED):
        raise Unusable("continues what is stored on a server")
    instructions, given = body.get("instructions"), body.get("input")
    messages: list[dict[str, Any]] = []
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Unusable("no prompt in the request")
    for item in given:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    if not isinstance(item, dict):
        raise Unusable("malformed message")
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind != "reasoning":  # a summary or a cipher of it, not what the model wrote
        raise Unusable(f"item of type {kind if isinstance(kind, str) else type(kind).__name__}")


def responses_tools(tools: list[Any] | None) -> list[Any] | None:
    """The tools in the form of chat requests.

    Raises:
        Unusable: one is run by the server, such as a web search.
    """
    if tools is None:
        return None
    if not all(isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        raise Unusable("tool that the server runs")
    return [
        {"type": "function", "function": {key: part for key, part in tool.items() if key != "type"}} for tool in tools
    ]


def responses_answer(response: dict[str, Any]) -> RecordedAnswer | None:
    """The answer in a body of `response` as a chat's: its text, thoughts and function calls; None if it has no output.

    Its finish reason is None if the answer was not finished.

    Raises:
        Unusable: a part is not text, or was made by the server, such as a web search.
    """
    items = response.get("output")
    if not isinstance(items, list) or not items:
        return None
    content = thoughts = ""
    calls: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "message":
            content += _join(item.get("content"), "output_text")
        elif kind == "reasoning":
            thoughts += _join(item.get("content"), "reasoning_text")
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        else:
            raise Unusable(f"item of type {kind}")
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    finished = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}
    details = response.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") not in (None, "max_output_tokens"):  # a content filter
        finished = {}
    return RecordedAnswer(message=message, finish=finished.get(str(response.get("status"))))


def _join(parts: Any, kind: str) -> str:
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if any(part.get("type") != kind for part in found):
        raise Unusable("multimodal content")
    return "".join(str(part.get("text") or "") for part in found)
