"""`eagle-plugin doctor`: what it prints and its exit codes. The verdicts of the engines have tests of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from eagle_plugin import cli
from eagle_plugin.doctor import command, engine_answer, environment
from eagle_plugin.doctor.start_command import read_command
from eagle_plugin.kernels import loader
from eagle_plugin.runtime import verdict
from eagle_plugin.runtime.verdict import Cost, Verdict

START = [sys.executable, "-m", "sglang.launch_server", "--model-path", "MODEL"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", *args])
    return (code, *capsys.readouterr())


def found(**changes: object) -> Verdict:
    values: dict[str, object] = {"engine": "vLLM", "version": "0.32.0", "serves": "plugin", "sentence": "the line"}
    return Verdict(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("serves", "code"), [("plugin", 0), ("engine", 1), ("plain", 1), ("nobody", 2)])
def test_the_exit_code_says_who_serves(serves, code, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "ask", lambda asked: found(serves=serves, reasons=["--a 1: why"]))
    assert run(capsys, "--", *START)[0] == code
    as_json = json.loads(run(capsys, "--json", "--", *START)[1])
    assert (as_json["exit_code"], as_json["serves"], as_json["sentence"]) == (code, serves, "the line")
    assert as_json["command"]["arguments"] == START[3:] and as_json["reasons"] == ["--a 1: why"]


def test_everything_that_was_found_is_printed(capsys, monkeypatch) -> None:
    memory = [Cost("weights", 29_000_000, "all ranks"), Cost("cache", None), Cost("logits", 512)]
    full = found(serves="engine", warnings=["a warning"], changes=["leave out --x", "set --y"], open=["later"])
    full.memory, full.plugin = memory, "eagle-plugin 0.1.0: vLLM loads it"
    monkeypatch.setattr(command, "ask", lambda asked: full)
    _, out, _ = run(capsys, *START)
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["because", "the line"] in rows and ["warning", "a warning"] in rows and ["open", "later"] in rows
    assert ["change", "leave out --x"] in rows and "        set --y" in out
    assert ["memory", "weights: 27.7 MiB (all ranks)"] in rows
    assert "cache: not known before the start" in out and "logits: 512 bytes" in out


def test_a_command_that_starts_no_server_is_one_sentence(capsys) -> None:
    code, out, err = run(capsys, "--", "docker", "run")
    assert (code, out) == (2, "") and err.startswith("error: the command starts 'docker'") and err.count("\n") == 1


def test_an_interpreter_without_plugin_or_engine(capsys, tmp_path) -> None:
    """Real processes: an environment with nothing in it."""
    import venv

    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env/bin/python")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        command_line = [python, "-m", "vllm.entrypoints.openai.api_server"]
        code, out, err = run(capsys, "--", *command_line)
        assert (code, out) == (2, "") and "has no Python package vllm, so that it cannot start vLLM" in err
        (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
        (own / "vllm.py").touch()
        code, out, _ = run(capsys, "--", *command_line)
        assert code == 1 and f"eagle-plugin is not installed for {python}" in " ".join(out.split())
        assert f"{python} -m pip install . in the folder of eagle-plugin" in " ".join(out.split())
        (own / "here.pth").write_text(f"{Path(command.__file__).parents[2]}\n")
        code, out, err = run(capsys, "--", *command_line)
        assert code == 2 and out == "" and "has no Python package" in err and err.count("\n") == 1


def test_without_a_command_the_environment_decides(capsys, monkeypatch, tmp_path) -> None:
    loader.backend("cpu")  # not built anew in an empty cache
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "deep/cache"))
    for name in ("EAGLE_PLUGIN", "SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    code, out, _ = run(capsys)
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and rows["sglang"].endswith("which loads the plugin") and rows["kernels"] == "native (C++)"
    assert rows["cache"] == f"{tmp_path}/deep/cache can be written" and rows["self-test"] == "has not run here"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    code, out, _ = run(capsys)
    assert code == 1 and "! " in out and "SGLANG_PLUGINS=other,eagle_plugin" in out
    monkeypatch.setenv("SGLANG_PLUGINS", "other,eagle_plugin")
    assert run(capsys)[0] == 0
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    assert run(capsys)[0] == 1
    monkeypatch.setenv("EAGLE_PLUGIN", "yes")
    assert "'yes' is none of 1, 0, force, taken as 1" in run(capsys)[1]


def test_an_environment_with_a_fault(capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(environment, "TESTED", {"sglang": ("0.1.0",), "vllm": ("0.1.0",)})
    as_json = json.loads(run(capsys, "--json")[1])
    findings = {one["name"]: one for one in as_json["findings"]}
    assert as_json["exit_code"] == 1 and findings["cache"]["is_fault"]
    assert "correct EAGLE_CACHE_DIR" in findings["cache"]["text"]
    assert findings["sglang"]["text"].endswith("the plugin is not active, it was tested with 0.1.0")
    monkeypatch.setattr(verdict.metadata, "entry_points", lambda group: [])
    assert "has no entry point eagle_plugin" in run(capsys)[1]


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_a_server_on_a_cpu_needs_its_variable(value, monkeypatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    printed = json.dumps(asdict(found(engine="SGLang")))
    done = subprocess.CompletedProcess([], 0, stdout=f"{printed}\n", stderr="")
    monkeypatch.setattr(engine_answer.subprocess, "run", lambda *_, **__: done)
    assignment = [] if value is None else [f"SGLANG_USE_CPU_ENGINE={value}"]
    for flags in (["--device", "cpu"], ["--device=cpu"], ["--device", "cuda"]):
        warnings = engine_answer.ask(read_command([*assignment, *START, *flags])).warnings
        assert [line for line in warnings if "SGLANG_USE_CPU_ENGINE=1" in line] == warnings
        assert bool(warnings) == (value != "1" and "cuda" not in flags)


def test_kernels_that_no_server_could_load(capsys, monkeypatch) -> None:
    for name in ("EAGLE_PLUGIN", "SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)

    def refuse() -> str:
        raise ValueError("EAGLE_KERNELS is 'foo'")

    monkeypatch.setattr(loader, "backend", refuse)
    code, out, _ = run(capsys)
    assert code == 1 and "! EAGLE_KERNELS is 'foo'" in out


def test_the_cache_is_one_folder_for_all(monkeypatch, tmp_path) -> None:
    from eagle_plugin.models import model_folder
    from eagle_plugin.runtime import cost_files
    from eagle_plugin.selftest import record

    monkeypatch.delenv("EAGLE_CACHE_DIR", raising=False)
    for variable, value, folder in (
        ("XDG_CACHE_HOME", tmp_path / "xdg", tmp_path / "xdg/eagle-plugin"),
        ("EAGLE_CACHE_DIR", tmp_path / "own", tmp_path / "own"),
    ):
        monkeypatch.setenv(variable, str(value))
        assert model_folder("smollm2-135m-instruct").parent == folder / "models"
        assert loader.cache_dir() == folder / "kernels"
        assert (cost_files.folder(), record.folder()) == (folder / "costs", folder / "selftest")
        assert environment._cache().text == f"{folder} can be written"


def test_the_report_has_no_secrets(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EAGLE_DEPLOY", f"{tmp_path}/deploy?token=abc")
    monkeypatch.setenv("EAGLE_CAPTURE", "https://me:secret@host/folder?signature=xyz")
    assert cli.main(["version", "--report"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("```\n") and out.endswith("\n```\n") and "eagle-plugin" in out and "sglang" in out
    assert "~/cache" in out and str(tmp_path) not in out and "secret" not in out and "xyz" not in out


def test_version_says_that_a_list_drops_us(capsys, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert cli.main(["version"]) == 0
    assert "the plugin is not active: SGLANG_PLUGINS is 'other'" in capsys.readouterr().out
