"""The fields of a recorded request beside its prompt: sampling parameters, tools, and the day."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import Any

from eagle_plugin.learning.data.sources.conversation import Unusable, decode_text

# The fields of a request that change the answer; others (model, stream, user, ...) are not kept.
# Those that are numbers, with the least and the greatest that a server takes.
NUMERIC_SAMPLING = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "max_tokens": (1, 1 << 31),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
}
LAST_SECOND = 1 << 32  # of 2106; milliseconds are far above it
SAMPLING = (*NUMERIC_SAMPLING, "stop", "chat_template_kwargs", "reasoning_effort", "tool_choice", "response_format")
RENAMED = {name: "max_tokens" for name in ("max_completion_tokens", "max_new_tokens", "max_output_tokens")}
PROMPT_CHANGES = ("documents", "chat_template", "truncate_prompt_tokens", "session_params")


def read_sampling(body: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a request that change its answer, and what was left out of them: servers refuse such values.

    The prompt of such a request can still be used.
    """
    if not isinstance(body, dict):
        return {}, ()
    renamed = {RENAMED.get(key, key): value for key, value in body.items()}
    kept = {key: renamed[key] for key in SAMPLING if renamed.get(key) is not None}
    wrong = [key for key, value in kept.items() if key in NUMERIC_SAMPLING and not _is_within(value, key)]
    return {key: kept[key] for key in kept if key not in wrong}, tuple(
        f"sampling value left out: {key}" for key in wrong
    )


def _is_within(value: Any, name: str) -> bool:
    least, most = NUMERIC_SAMPLING[name]
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    return is_number and least <= value <= most


def continues_answer(body: dict[str, Any]) -> bool:
    """Whether the last message of a request is the beginning of the answer, which the client gave."""
    return bool(body.get("continue_final_message")) or body.get("add_generation_prompt") is False


def changes_prompt(body: dict[str, Any]) -> bool:
    """Whether a request has fields, of vLLM or SGLang, with which its prompt is not what its messages or text give.

    Its recorded answer is then one to another prompt.
    """
    special = body.get("add_special_tokens")
    is_chat = isinstance(body.get("messages"), list)
    return any(body.get(name) for name in PROMPT_CHANGES) or special is not None and bool(special) == is_chat


def size_beside_prompt(tools: Any, sampling: Any) -> int:
    """Characters of what a record has of a request beside its prompt."""
    return len(json.dumps([tools, sampling], ensure_ascii=False))


def read_tools(body: dict[str, Any]) -> list[Any] | None:
    """The tools of a request, as JSON text too; of the older `functions`, each as a tool."""
    tools = body.get("tools")
    tools = decode_text(tools, "malformed tools") if isinstance(tools, str) else tools
    if not tools and body.get("functions"):
        given = body["functions"]
        given = decode_text(given, "malformed tools") if isinstance(given, str) else given
        tools = [{"type": "function", "function": one} for one in given] if isinstance(given, list) else given
    if tools is not None and not isinstance(tools, list):
        raise Unusable("malformed tools")
    return tools or None


def read_date(value: dict[str, Any]) -> str | None:
    """The day of a record: `time` of a capture, `created` of an answer; both are seconds since 1970."""
    seconds = value.get("time", value.get("created"))
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < LAST_SECOND:
        return None
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d")
