"""What the adapters tell of the served target, and how it reaches the writer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_plugin.sglang import traffic as sglang
from eagle_plugin.traffic import middleware
from eagle_plugin.traffic.accepted_drafts import AcceptedDrafts
from eagle_plugin.traffic.middleware import CaptureMiddleware
from eagle_plugin.traffic.served import ServedTarget
from eagle_plugin.traffic.settings import CaptureSettings
from eagle_plugin.vllm import traffic as vllm

GIVEN = {"revision": "main", "chat_template": "t.jinja"}


def test_both_adapters_tell_the_same() -> None:
    args = SimpleNamespace(model="org/name", tokenizer=None, enable_lora=False, **GIVEN)
    of = SimpleNamespace(model_path="org/name", tokenizer_path="org/name", enable_lora=None, lora_paths=None, **GIVEN)
    assert sglang._served(of) == vllm._served(args) == ServedTarget("name", "org/name", "main", None, "t.jinja")
    args.tokenizer = of.tokenizer_path = "org/other"
    assert sglang._served(of) == vllm._served(args) == ServedTarget("name", "org/name", "main", "org/other", "t.jinja")


def test_with_adapters_of_lora_nobody_knows_what_answered() -> None:
    args = SimpleNamespace(model="m", tokenizer=None, enable_lora=True, **GIVEN)
    of = SimpleNamespace(model_path="m", tokenizer_path="m", enable_lora=None, lora_paths=["a"], **GIVEN)
    assert sglang._served(of) is vllm._served(args) is None


def test_a_name_is_found_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    found = {"org/name": str(tmp_path / "snapshot/config.json"), "org/other": None}
    asked = []

    def look(name: str, file: str, revision: str | None = None) -> Any:
        asked.append((name, file, revision))
        return found[name]

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    located = ServedTarget("name", "org/name", "v2", "org/other").located()
    assert located == ServedTarget("name", str(tmp_path / "snapshot"), "v2", "org/other")
    assert asked == [("org/other", "config.json", None), ("org/name", "config.json", "v2")]
    here = ServedTarget.of(str(tmp_path))
    assert here.located() == here and here.name == tmp_path.name


def test_it_reaches_the_writer_with_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CaptureSettings] = []
    monkeypatch.setattr(middleware, "Recorder", lambda settings, show: made.append(settings))
    monkeypatch.setattr(middleware, "CaptureMetrics", lambda model: SimpleNamespace(update=None))
    monkeypatch.setattr(CaptureMiddleware, "served", ServedTarget.of(str(tmp_path)))
    monkeypatch.setenv("EAGLE_CAPTURE", str(tmp_path))
    CaptureMiddleware(None)
    assert made[0].served == ServedTarget(tmp_path.name, str(tmp_path))
    assert CaptureSettings.from_json(made[0].to_json()) == made[0]


def test_sglang_notes_the_rounds_of_finished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = AcceptedDrafts()
    monkeypatch.setattr(sglang, "ACCEPTED_DRAFTS", noted)
    assert sglang.note_drafts(None, object(), {"id": "a", "spec_correct_drafts_histogram": [2, 1]}, object(), 0) is None
    sglang.note_drafts(None, object(), {"id": "b"}, object(), 0)
    assert (noted.take(b'{"id":"a"}'), noted.take(b'{"id":"b"}')) == ([2, 1], None)
