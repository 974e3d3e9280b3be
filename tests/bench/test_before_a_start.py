"""What a command refuses before it starts a server: exit code 2, one sentence, and no log."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import tiny_models
from rich.console import Console

from eagle_plugin.bench import choices
from eagle_plugin.bench.choices import check_engine, resolve_head
from eagle_plugin.bench.fitting import check_fits
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.cli import main
from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.heads.files import HeadError
from eagle_plugin.models import PUBLIC, ModelError, head_folder, target_folder
from eagle_plugin.models.shipped import HEAD

COMMANDS = ("demo", "serve", "bench", "bench-serving", "benchmark")


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are installed, and a server that starts is a failure of the test."""

    def started(self: Server) -> Server:
        raise AssertionError(f"{self.label} was started")

    monkeypatch.setattr(choices, "_is_installed", lambda engine: True)
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(Server, "start", started)
    for name in ("SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def other_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of a target with twice the width."""
    folder = tmp_path_factory.mktemp("other")
    target = tiny_models.tiny_llama(folder / "target", hidden=128)
    return tiny_models.tiny_eagle3_head(folder / "head", target)


def refused(capsys: pytest.CaptureFixture[str], name: str, target: Path, out: Path, *options: str) -> str:
    """The sentence of a command that refuses these options."""
    named = [str(target)] if name == "benchmark" else ["--target", str(target)]
    assert main([name, *named, *options, "--device", "cpu", "--out", str(out)]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name} failed: ") and not (out / "logs").exists()
    return " ".join(printed.split())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_head_of_another_target(name, engine, tiny_target, other_head, tmp_path, capsys) -> None:
    text = refused(capsys, name, tiny_target, tmp_path, "--head", str(other_head), "--engine", engine)
    assert str(other_head) in text and "128" in text


@pytest.mark.parametrize("engine", ["sglang", "vllm", None])
def test_what_fits(engine, tiny_target, tiny_eagle3, tiny_eagle2, other_head, tmp_path) -> None:
    for head in (tiny_eagle3, tiny_eagle2):
        check_fits(tiny_target, head, engine)
        assert resolve_head(head, tiny_target, engine) == head.resolve()
    with pytest.raises(HeadError):
        check_fits(tiny_target, other_head, engine)
    with pytest.raises(HeadError):
        check_fits(tiny_target, tiny_target, engine)  # the target in the place of its head
    own = tmp_path / "own"  # a class of heads that SGLang serves by itself, and which is none of ours
    shutil.copytree(tiny_eagle3, own)
    config = json.loads((own / "config.json").read_text()) | {"architectures": ["DeepseekModelNextN"]}
    (own / "config.json").write_text(json.dumps(config))
    check_fits(tiny_target, own, "sglang")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(9, 70, 8), "is 560, wanted at most 64"),
        (Shape(2, 4, MAX_WIDTH + 1), "at most 64 nodes"),
        (Shape(0, 4, 8), "at least 1"),
        (Shape(2, 4, 1), "at least 2"),
    ],
)
def test_a_tree_beyond_the_limits(shape, reason, tiny_target, tiny_eagle3, tmp_path, capsys) -> None:
    head = ("--head", str(tiny_eagle3), "--engine", "sglang")
    separate = ("--steps", str(shape.steps), "--topk", str(shape.topk), "--draft-tokens", str(shape.width))
    for name, options in (
        ("serve", ("--shape", str(shape))),
        ("demo", separate),
        ("bench", ("--mode", "plugin", "--shapes", "2/4/8", str(shape))),
    ):
        text = refused(capsys, name, tiny_target, tmp_path, *head, *options)
        assert f"no tree {shape}" in text and reason in text
    ServerSpec(tiny_target, "builtin", tiny_eagle3, shape)  # of the engine's own, which says itself what it takes


def test_vllm_drafts_no_deeper_than_its_nodes(tiny_target, tiny_eagle3, tmp_path, capsys) -> None:
    options = ("--head", str(tiny_eagle3), "--engine", "vllm", "--shape", "9/4/8")
    assert "vLLM drafts 7 tokens per round" in refused(capsys, "serve", tiny_target, tmp_path, *options)


@pytest.mark.parametrize(("engine", "variable"), [("sglang", "SGLANG_PLUGINS"), ("vllm", "VLLM_PLUGINS")])
def test_a_list_of_plugins_without_this_one(
    engine, variable, tiny_target, tiny_eagle3, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv(variable, "other")
    for name in ("serve", "demo"):
        text = refused(capsys, name, tiny_target, tmp_path, "--head", str(tiny_eagle3), "--engine", engine)
        assert f"set {variable}=other,eagle_plugin, or unset it" in text
    check_engine(engine, "cpu", False)  # a plain server needs no plugin
    monkeypatch.setenv(variable, "other,eagle_plugin")
    check_engine(engine, "cpu")


def test_the_name_of_a_target_is_no_head(tiny_target, tmp_path, capsys) -> None:
    target = next(iter(PUBLIC))
    for name in (target, "smollm2-135m-instruct"):
        text = refused(capsys, "serve", tiny_target, tmp_path, "--head", name)
        assert f"{name} is the name of a target, wanted a draft head" in text
        with pytest.raises(ModelError, match="is the name of a target"):
            head_folder(name)
    for name in (HEAD, PUBLIC[target].head):  # `check` with its arguments swapped
        with pytest.raises(ModelError, match="is the name of a draft head, wanted a target"):
            target_folder(name)


def test_other_refusals_have_code_2_as_well(tiny_target, tiny_eagle3, tmp_path, capsys) -> None:
    head = ("--head", str(tiny_eagle3), "--engine", "sglang")
    missing = str(tmp_path / "missing.jsonl")
    assert missing in refused(capsys, "demo", tiny_target, tmp_path, *head, "--prompts", missing)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refused(capsys, "serve", tiny_target, tmp_path, *head, "--port", port)


def test_a_failure_after_the_first_start_has_code_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def command() -> int:
        Server.started += 1
        raise ServerError("it ended")

    monkeypatch.setattr(Server, "started", 7)
    assert exit_status("bench", Console(), command) == 1
    assert capsys.readouterr().out == "bench failed: it ended\n"


def test_a_second_ctrl_c_does_not_say_that_all_is_down(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def command() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "running", set())  # not those of other tests
    assert exit_status("bench", Console(), command) == 130
    assert "all servers are down" in capsys.readouterr().out
    left = Server([], 1, "sglang-plain-bf16", Path("none.log"), {})
    monkeypatch.setattr(Server, "running", {left})
    assert exit_status("bench", Console(), command) == 130
    assert capsys.readouterr().out == "\nstopped; ending sglang-plain-bf16\n"
