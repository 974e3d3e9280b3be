"""What the adapters tell of the served target, and how it reaches the writer."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_plugin.heads.manifest import describe_target
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


def test_a_snapshot_of_the_hub_is_called_as_on_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--My-Model-8B" / "snapshots" / "0e9e39f249a16976918f6564b8830bc894c89659"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link", f"{snapshot}/"):
        assert ServedTarget.of(str(folder)).name == describe_target(folder)["name"] == "My-Model-8B"
    assert describe_target(tmp_path)["name"] == tmp_path.name


class Made:
    """In place of a recorder."""

    all: list[Made] = []

    def __init__(self, settings: CaptureSettings, show: Any) -> None:
        self.settings, self.closed = settings, 0
        self.all.append(self)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """The recorders that middlewares of this test make, and no metrics."""
    monkeypatch.setattr(Made, "all", [])
    monkeypatch.setattr(middleware, "Recorder", Made)
    monkeypatch.setattr(middleware, "CaptureMetrics", lambda model: SimpleNamespace(update=model))
    monkeypatch.setattr(CaptureMiddleware, "_recorders", [])
    monkeypatch.setenv("EAGLE_CAPTURE", str(tmp_path))
    return Made.all


def test_it_reaches_the_writer_with_the_settings(
    tmp_path: Path, made: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CaptureMiddleware, "served", ServedTarget.of(str(tmp_path)))
    CaptureMiddleware(None)
    given = made[0].settings
    assert given.served == ServedTarget(tmp_path.name, str(tmp_path))
    assert CaptureSettings.from_json(given.to_json()) == given


def test_each_of_several_api_servers_knows_the_target(
    tmp_path: Path, made: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get the launcher's flags, with the middleware, and the environment; no plugin tells them anything before."""
    monkeypatch.setattr(vllm, "check_writer", lambda settings: None)
    monkeypatch.setenv("_EAGLE_CAPTURE_SERVED", "{}")
    monkeypatch.setattr(CaptureMiddleware, "model", "")
    monkeypatch.setattr(CaptureMiddleware, "served", None)
    args = SimpleNamespace(model=str(tmp_path), tokenizer=None, enable_lora=False, middleware=[], **GIVEN)
    vllm.add_middleware(args)
    assert args.middleware == [vllm.MIDDLEWARE]
    CaptureMiddleware.model, CaptureMiddleware.served = "", None
    CaptureMiddleware(None)
    vllm.add_middleware(args)  # after the plugins are loaded there
    CaptureMiddleware(None)
    assert [one.settings.served for one in made] == [vllm._served(args)] * 2 and args.middleware == [vllm.MIDDLEWARE]


def test_sglang_closes_the_writer_before_it_kills_what_is_below_it(made: list[Made]) -> None:
    CaptureMiddleware(None)
    sglang.close_writer(os.getpid() + 1)
    assert made[0].closed == 0
    sglang.close_writer(os.getpid(), include_parent=False, wait_timeout=60)
    assert made[0].closed == 1


def test_sglang_notes_the_rounds_of_finished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = AcceptedDrafts()
    monkeypatch.setattr(sglang, "ACCEPTED_DRAFTS", noted)
    assert sglang.note_drafts(None, object(), {"id": "a", "spec_correct_drafts_histogram": [2, 1]}, object(), 0) is None
    sglang.note_drafts(None, object(), {"id": "b"}, object(), 0)
    assert (noted.take(b'{"id":"a"}'), noted.take(b'{"id":"b"}')) == ([2, 1], None)
