"""Requests and answers as servers of the OpenAI API have them on the wire."""

from __future__ import annotations

import json
from typing import Any

from eagle_plugin.traffic.frames import Exchange


def stream(events: list[dict[str, Any]]) -> bytes:
    """Server-sent events; text is not escaped, as in both engines."""
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def exchange(request: dict[str, Any], answer: Any, time: float = 1_700_000_000.0) -> Exchange:
    """answer: a body, or a list of events of a stream."""
    body = stream(answer) if isinstance(answer, list) else json.dumps(answer).encode()
    return Exchange(time, json.dumps(request).encode(), body)


def chat(text: str, **more: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": "m", "user": "u-17", "messages": [{"role": "user", "content": text}], **more}


def answered(*responses: str, **more: Any) -> dict[str, Any]:
    """The body of an answer with a choice per response; more is in every choice."""
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **more}
        for index, text in enumerate(responses)
    ]
    return {"id": "chatcmpl-1", "choices": choices}


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event of a streamed chat."""
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}
