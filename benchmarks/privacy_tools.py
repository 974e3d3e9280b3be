"""The third set of the privacy benchmark: tool results, code, logs and configuration, as they are and inside of JSON.

Both halves were written before the patterns for them. Rules may be tuned on the half `development`; the documents
report the half `reported`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from privacy_sets import framed, read_texts

from eagle_plugin.learning.data.privacy.redact import redact
from eagle_plugin.learning.data.privacy.scanner import Scanner

# What a text is put into: the whole text of a message is JSON, or JSON is in prose, or the text is code.
WRAPPINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "JSON": lambda text: json.dumps({"exit_code": 0, "stdout": text, "took": 0.25}),
    "JSON in JSON": lambda text: json.dumps([{"id": 7, "result": json.dumps({"log": text}, ensure_ascii=False)}]),
    "JSON in prose": lambda text: f"The tool returned: {json.dumps({'output': text}, ensure_ascii=False)}\nWhat next?",
    "code": lambda text: f"log.write({json.dumps(text, ensure_ascii=False)})  # line 12",
}
_PLACEHOLDER = re.compile(r"<[A-Z_]+_\d+>")
LONGEST_REST = 3  # characters of a value that may stay in a row


@dataclass(frozen=True)
class ToolText:
    """A text with a private value, the wrapping that it is in, and the text without the value."""

    kind: str
    wrapping: str
    text: str
    value: str
    frame: str


def private_texts(half: str) -> Iterator[ToolText]:
    """Every text of this half in every wrapping."""
    for kind, frame, value in framed(read_texts(f"tools-{half}")):
        inner = json.dumps(value)[1:-1] if frame[0] in "{[" else value
        for wrapping, wrap in WRAPPINGS.items():
            yield ToolText(kind, wrapping, wrap(frame.replace("§", inner)), value, wrap(frame.replace("§", "")))


def harmless_texts(half: str) -> Iterator[tuple[str, str]]:
    """Every harmless text of this half in every wrapping, as (wrapping, text)."""
    for wrapping, wrap in WRAPPINGS.items():
        yield from ((wrapping, wrap(text)) for text in read_texts(f"tools-{half}")["harmless"])


def is_hidden(text: ToolText, scanner: Scanner) -> bool:
    """Whether the redacted text has no part of the value any more, however it is escaped."""
    redacted = _unescaped(_PLACEHOLDER.sub("\0", redact([text.text], scanner)[0][0]))
    value, frame = _unescaped(text.value), _unescaped(text.frame)
    size = min(len(value), LONGEST_REST + 1)
    parts = (value[start : start + size] for start in range(len(value) - size + 1))
    return not any(part in redacted and part not in frame and part.strip() for part in parts)


def stays_json(text: str, scanner: Scanner) -> bool | None:
    """Whether a text that is JSON is still JSON with the same keys and numbers when redacted; None: it is no JSON."""
    if not _is_json(text):
        return None
    try:
        return _shape(json.loads(redact([text], scanner)[0][0])) == _shape(json.loads(text))
    except ValueError:
        return False


def _shape(value: Any) -> Any:
    """The value without the texts of its strings; a string that is JSON has the shape of what it holds."""
    if isinstance(value, dict):
        return [(key, _shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [_shape(item) for item in value]
    if isinstance(value, str):
        return _shape(json.loads(value)) if value.startswith(("{", "[")) and _is_json(value) else ""
    return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _unescaped(text: str) -> str:
    """The text without backslashes and line ends: the same for every number of escapes."""
    text = re.sub(r"\\+u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    return re.sub(r"\\+[nrt]|[\\\n\r\t]", "", text)
