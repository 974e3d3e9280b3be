"""The `eagle-plugin` command: what it prints, what it refuses, and that it starts without heavy imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_plugin import __version__, cli
from eagle_plugin.models import ModelError, head_folder, target
from eagle_plugin.models.shipped import recipe_file

HEAD = "smollm2-135m-instruct-eagle3"  # comes with the package
NAME = "smollm2-135m-instruct"
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
    assert "hf download" in refused(capsys, "check", tmp_path / "nowhere", HEAD)


def test_a_name_of_the_catalogue_is_a_target_of_every_command(capsys, monkeypatch, tmp_path):
    """The model is asked for by its name; here it cannot be prepared, which each command says in one line."""

    def get_model(name, report):
        raise ModelError(f"asked for {name}")

    monkeypatch.setattr(target, "get_model", get_model)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: {NAME}\ndata: {{store: features}}\nbudget: {{updates: 1}}\n")
    job = tmp_path / "job.yaml"
    job.write_text(f"target: {NAME}\nprompts: {{builtin: 1}}\ntrain: {{head: {{budget: {{updates: 1}}}}}}\n")
    rows, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "out")
    for args in (
        ["check", NAME, HEAD],
        ["eval", NAME, HEAD],
        ["export", HEAD, out, "--target", NAME],
        ["data", "prepare", rows, "--out", out, "--tokenizer", NAME],
        ["data", "render", rows, "--target", NAME, "--out", out],
        ["data", "vocabulary", rows, "--target", NAME, "--out", out],
        ["data", "features", rows, "--target", NAME, "--store", out],
        ["train", str(recipe), "--out", out],
        ["optimize", str(job), "--out", out],
    ):
        code, printed, err = run(capsys, *args)
        assert code == 2 and err.count("error: ") == 1 and f"asked for {NAME}" in err, (args, printed, err)


def test_the_shipped_head_and_recipe_have_names(capsys):
    assert (head_folder(HEAD) / "model.safetensors").is_file() and head_folder("other") == Path("other")
    for action in ("path", "get"):
        code, out, _ = run(capsys, "models", action, HEAD)
        assert code == 0 and Path(out.strip()) == head_folder(HEAD)
    assert "gpt-oss-20b" in refused(capsys, "models", "get", "gpt-5")  # all names
    assert recipe_file(NAME).is_file() and recipe_file("mine.yaml") == Path("mine.yaml")


def test_a_folder_goes_before_a_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in (NAME, HEAD):
        Path(name).mkdir()
    assert (target.target_folder(NAME), head_folder(HEAD)) == (Path(NAME), Path(HEAD))


def test_a_missing_package_is_one_line(capsys, monkeypatch):
    """Installed alone, without an engine."""
    for name in ("torch", "httpx"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "eagle_plugin.bench.serve", raising=False)
    monkeypatch.delitem(sys.modules, "eagle_plugin.bench.servers", raising=False)
    assert "needs the Python package httpx" in refused(capsys, "serve")


def test_models_list_tells_what_is_to_download(capsys):
    code, out, _ = run(capsys, "models", "list")
    assert code == 0
    assert NAME in out and "93 MB to download" in out and "Apache-2.0" in out and HEAD in out


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
    monkeypatch.setattr(cli, "_installed", lambda name, *others: {"sglang": "0.4.9", "vllm": "0.32.0+cpu"}.get(name))
    monkeypatch.setattr(cli, "_kernels", lambda: "torch")
    printed = run(capsys, "version")[1]
    assert "0.4.9 (the plugin is not active: it was tested with 0.5.22, 0.5.23)" in printed
    assert "0.32.0+cpu\n" in printed


def test_starts_without_heavy_imports():
    script = (
        "import sys, eagle_plugin.cli as c; c._parser(); print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
