"""What the commands write for fixed input, byte by byte: stored data and its ids must not change between versions."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from store_documents import make_store_old, write_store
from token_endpoint import TokenEndpoint

from eagle_plugin.learning.data import generate, prepare
from eagle_plugin.learning.data.privacy.scanner import Scanner
from eagle_plugin.learning.data.sources.builtin_prompts import builtin_prompts, recorded_prompts
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt


def digest(*parts: str | bytes) -> str:
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(data).hexdigest()[:16]


def test_builtin_prompts():
    openings, code = [f"opening {n}" for n in range(1500)], [f"def f{n}(): ..." for n in range(300)]
    assert digest(*map(format_prompt, builtin_prompts(openings, code))) == "7fbab3385e3c915c"
    dialogues = [(f"opening {n}", f" answer {n} ") for n in range(50)]
    assert digest(*map(format_prompt, recorded_prompts(dialogues))) == "d0430db939c5b9d0"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"id": "c1", "function": {"name": "login", "arguments": json.dumps({"password": "vT9#kLq2!x"})}}
CHAT = {
    "messages": [
        {"role": "developer", "content": "Be brief"},
        user([{"type": "text", "text": "Log in as"}, {"type": "text", "text": "anna.berg@firma.de ü"}]),
        {"role": "assistant", "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": "Done"},
    ],
    "tools": [{"type": "function", "function": {"name": "login"}}],
    "temperature": 0.5,
    "max_completion_tokens": 9,
}
SHORT = {"messages": [user("Hi"), {"role": "assistant", "content": "Hello"}, user("Bye")]}
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Bye!"}, "finish_reason": "stop"}]}
SIDES = {
    "endpointInput": {"data": base64.b64encode(json.dumps(SHORT).encode()).decode(), "encoding": "BASE64"},
    "endpointOutput": {"data": json.dumps(ANSWER), "encoding": "JSON"},
}
RESPONSE = {"text": "Hello", "token_ids": [7, 8], "finish_reason": "stop"}
FORMATS: dict[str, list[dict[str, Any]]] = {
    "sharegpt": [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}],
    "chat": [CHAT, SHORT, *({"messages": [user(f"What is {n} times {n}?")]} for n in range(40))],
    "batch": [{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": SHORT}],
    "completions": [{"prompt": ["Once", "Twice"], "choices": [{"index": 1, "text": "B"}]}, {"prompt": "a\nb"}],
    "sagemaker": [{"captureData": SIDES, "eventVersion": "0"}],
    "capture": [{"v": 1, "id": "1", "request": SHORT, "response": RESPONSE, "prompt_token_ids": [1, 2]}],
}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--privacy", "off", "--keep-responses"), "4cfab6e8a6147e4f"),
        (("--privacy", "redact", "--keep-responses"), "dd9146998febeafc"),
        (("--privacy", "drop", "--source", "support"), "2f8573d531de7e84"),
    ],
)
def test_prepared_prompts(options: tuple[str, ...], wanted: str, scanner: Scanner, tmp_path: Path):
    written = []
    for name, records in FORMATS.items():
        file, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert prepare.main([str(file), "--out", str(out), "--val-share", "0.1", "--workers", "1", *options]) == 0
        written.append(out.read_bytes())
    assert digest(*written) == wanted


def test_generated_rows(tmp_path: Path):
    history = [user("a"), {"role": "assistant", "content": "recorded"}]
    prompts = [Prompt(f"p{n}", "test", messages=[*history, user(f"b{n}")]) for n in range(8)]
    prompts += [Prompt("text", "test", prompt="Once", split="val")]
    prompts += [Prompt("ids", "test", prompt_ids=[5, 6], sampling={"temperature": 0.5})]
    (tmp_path / "prompts.jsonl").write_text("".join(map(format_prompt, prompts)))
    out = tmp_path / "rows.jsonl"
    with TokenEndpoint() as server:
        command = [str(tmp_path / "prompts.jsonl"), "--endpoint", server.url, "--out", str(out)]
        assert generate.main([*command, "--concurrency", "1"]) == 0
    assert digest(out.read_bytes()) == "f0dd3d97550d902a"
    assert out.with_suffix(".skipped.jsonl").read_bytes() == b""


def test_feature_stores(tmp_path: Path):
    write_store(tmp_path, range(40))
    assert digest_of_folder(tmp_path) == "4780bfd8b6ebd4eb"
    make_store_old(tmp_path)
    assert digest_of_folder(tmp_path) == "07d5b2d72d09d588"  # what version 0.1.0 wrote before there were plans


def digest_of_folder(folder: Path) -> str:
    return digest(*(part for path in sorted(folder.iterdir()) for part in (path.name, path.read_bytes())))
