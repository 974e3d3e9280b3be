"""The `eagle-plugin` command: what it prints, what it refuses, and that it starts without heavy imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_plugin import __version__, cli

HEAD = Path(__file__).parent.parent / "examples" / "heads" / "smollm2-135m-instruct-eagle3"
# What check_head reads of SmolLM2-135M-Instruct.
TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "cache"))


def write_target(folder: Path, **changes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    return folder


def run(capsys, *args) -> tuple[int, str, str]:
    try:
        code = cli.main(list(map(str, args)))
    except SystemExit as stop:  # argparse: --help and errors
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *args) -> str:
    """The one line that a refused command prints."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_help_teaches_with_examples(capsys):
    for args in ([], ["--help"]):
        code, out, _ = run(capsys, *args)
        assert code == 0
        assert "eagle-plugin models get smollm2-135m-instruct" in out and "EAGLE_PLUGIN=0" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serv"], "'serv'"),
        (["models"], "ACTION"),
        (["models", "drop"], "'drop'"),
        (["models", "get"], "NAME"),
        (["models", "get", "gpt-5"], "unknown model 'gpt-5'; known: smollm2-135m-instruct"),
        (["models", "path", "gpt-5"], "unknown model 'gpt-5'"),
        (["models", "path", "smollm2-135m-instruct"], "run: eagle-plugin models get smollm2-135m-instruct"),
        (["check", "only-a-target"], "HEAD"),
        (["check", "a", "b", "--algorithm", "MEDUSA"], "'MEDUSA'"),
        (["version", "--loud"], "--loud"),
    ],
)
def test_refused_in_one_line(capsys, args, message):
    assert message in refused(capsys, *args)


def test_check_describes_a_head_that_fits(capsys, tmp_path):
    code, out, err = run(capsys, "check", write_target(tmp_path / "target"), HEAD, "--files-only")
    assert code == 0
    assert err.startswith("warning: ") and "another config.json" in err and err.count("\n") == 1
    assert "--speculative-algorithm EAGLE3" in out
    assert "16,384 of 49,152" in out and "2, 15, 27" in out and "bfloat16" in out


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"hidden_size": 960}, [], "576"),
        ({"vocab_size": 32000}, [], "32000"),
        ({}, ["--algorithm", "EAGLE"], "use --speculative-algorithm EAGLE3"),
    ],
)
def test_check_refuses_a_head_for_another_target(capsys, tmp_path, changes, options, message):
    assert message in refused(capsys, "check", write_target(tmp_path / "target", **changes), HEAD, *options)


def test_check_refuses_folders_that_hold_no_checkpoint(capsys, tmp_path):
    target = write_target(tmp_path / "target")
    assert "config.json" in refused(capsys, "check", target, tmp_path / "nowhere")
    assert "models get" in refused(capsys, "check", "smollm2-135m-instruct", HEAD)  # known, but not in the cache


def test_models_list_tells_what_is_to_download(capsys):
    code, out, _ = run(capsys, "models", "list")
    assert code == 0
    assert "smollm2-135m-instruct" in out and "93 MB to download" in out and "Apache-2.0" in out


def test_version_names_plugin_engine_and_kernels(capsys, monkeypatch):
    from eagle_plugin.kernels import loader

    for backend, message in (("torch", "torch (no native"), ("native", "native (C++)")):
        monkeypatch.setattr(loader, "backend", lambda backend=backend: backend)
        code, out, _ = run(capsys, "version")
        rows = dict(line.split("  ", 1) for line in out.splitlines())
        assert code == 0
        assert rows["eagle-plugin"].strip() == __version__
        assert rows["kernels"].strip().startswith(message)
        assert {"python", "torch", "sglang", "vllm", "apache-tvm-ffi"} < rows.keys()


def test_the_version_is_an_option_too(capsys):
    assert run(capsys, "--version") == (0, f"eagle-plugin {__version__}\n", "")


@pytest.mark.parametrize(("output", "code"), [("/dev/full", 2), ("| true", 141)])
def test_an_output_that_cannot_be_printed(output, code, tmp_path):
    redirect = output if output.startswith("|") else f"> {output}"
    shell = f"{sys.executable} -m eagle_plugin.cli models list {redirect}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.count("\n") == (code == 2)
    assert "No space left on device" in done.stderr or code == 141


def test_version_names_the_tested_versions_where_the_plugin_does_not_serve(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_installed", {"sglang": "0.4.9"}.get)
    monkeypatch.setattr(cli, "_kernels", lambda: "torch")
    assert "0.4.9 (the plugin is not active: it was tested with 0.5.23)" in run(capsys, "version")[1]


def test_starts_without_heavy_imports():
    script = (
        "import sys, eagle_plugin.cli as c; c._parser(); print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
