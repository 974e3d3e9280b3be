"""The options of the commands, and their messages when something is missing."""

import argparse
import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle_plugin.bench import cell_run, choices, demo, serve, speed, startup, sweep
from eagle_plugin.bench.choices import parse_shape
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.preparation import base_spec
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import read_questions
from eagle_plugin.bench.servers import ServerError, child_environment
from eagle_plugin.bench.serving import trace_command
from eagle_plugin.bench.serving.configs import config_specs
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.states.configs import state_specs
from eagle_plugin.cli import main
from eagle_plugin.common.devices import DeviceError
from eagle_plugin.core.shape import Shape
from eagle_plugin.learning.loop import server as loop_server
from eagle_plugin.models.shipped import HEAD, question_files
from eagle_plugin.policy.shapes import CPU_SHAPE


def test_shapes_are_read_and_refused():
    assert parse_shape("3/1/4") == parse_shape("3") == Shape(3, 1, 4)
    for text in ("3/1", "a/b/c", "1/2/3/4", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="2/4/8"):
            parse_shape(text)


def test_flags_after_the_dashes_go_to_the_engine():
    options = serve.parse(["--port", "7", "--", "--chunked-prefill-size", "64"])
    assert options.port == 7 and options.engine_flags == ("--chunked-prefill-size", "64")


def test_curl_example_is_one_command():
    assert serve.curl_example("http://127.0.0.1:1").startswith("curl -N http://127.0.0.1:1/v1/chat/completions ")


def test_plain_serves_without_a_head():
    options = serve.parse(["--plain", "--concurrency", "64"])
    spec = serve.server_spec(options, Path("any-target"))
    assert (spec.mode, spec.head, spec.max_running_requests, spec.max_total_tokens) == ("plain", None, 64, 64 * 640)
    assert not [flag for flag in ENGINES["sglang"].command(spec, 1) if "speculative" in flag]
    assert serve.server_spec(serve.parse(["--plain"]), Path("any-target")).max_total_tokens == 16384


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plain", "--head", "x"], "has no --head"),
        (["--plain", "--shape", "2/4/8"], "has no --shape"),
        (["--concurrency", "0"], "--concurrency is 0, wanted at least 1"),
    ],
)
def test_serve_refuses_flags_that_contradict(flags, message, capsys):
    with pytest.raises(SystemExit):
        serve.parse(flags)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("any_head")
def test_the_shipped_head_is_for_its_own_target_only(tmp_path):
    """By the folder's name, as the hub writes it too; any other target needs a head of its own."""
    assert choices.resolve_head(None, Path("models/SmolLM2-135M-Instruct")).name == HEAD
    with pytest.raises(ServerError, match="needs a --head that was trained for it"):
        choices.resolve_head(None, tmp_path)
    assert choices.resolve_head(HEAD, tmp_path).name == HEAD
    with pytest.raises(ServerError, match="no config.json there"):
        choices.resolve_head("nowhere", tmp_path)


def test_the_default_engine_is_the_installed_one(monkeypatch):
    def only(name):
        monkeypatch.setattr(choices, "_is_installed", lambda engine: engine.name == name)

    only("vllm")
    assert serve.parse([]).engine == "vllm"
    with pytest.raises(ServerError, match="--engine sglang: sglang is not installed .*; use --engine vllm, or install"):
        choices.check_engine("sglang")
    only("sglang")
    assert serve.parse([]).engine == "sglang"
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match="needs the module sgl_kernel on a CPU, found none; install eagle-plugin-sgl"):
        choices.check_engine("sglang")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choices.check_engine("sglang")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(DeviceError, match="--device cuda cannot be used .*; give cpu: this torch finds no GPU here"):
        serve.server_spec(serve.parse(["--plain", "--device", "cuda"]), Path("any-target"))


@pytest.mark.usefixtures("any_head")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_commands_serve_on_a_gpu_if_there_is_one(has_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(choices, "check_device", lambda name: name)
    found = serve.server_spec(serve.parse(["--plain"]), tmp_path)
    asked = serve.server_spec(serve.parse(["--plain", "--device", "cpu"]), tmp_path)
    assert (found.device, asked.device) == ("cuda" if has_gpu else "cpu", "cpu")
    options = argparse.Namespace(engine="vllm", device=None, head=HEAD, threads=1, is_async=True, engine_flags=())
    base = base_spec(options, tmp_path, 4, 100)
    assert base.device == found.device and base.drafts == str(base.shape)
    assert replace(base, mode="plugin").drafts == f"{base.shape} async"
    options.engine = "sglang"
    with pytest.raises(ValueError, match="--async is of vLLM, found --engine sglang"):
        base_spec(options, tmp_path, 4, 100)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_is_alone_has_the_memory_of_its_gpu(engine, tmp_path):
    """Those of a benchmark share it; on a CPU the cache is limited in both cases."""
    shared = ServerSpec(tmp_path, "plain", engine=engine, device="cuda").for_concurrency(64).beside(2)
    limits = {"--max-total-tokens", "--mem-fraction-static", "--num-gpu-blocks-override", "--gpu-memory-utilization"}
    # vLLM's part is of the whole GPU, so it bounds the cache. SGLang's is of what is free, so the tokens bound it.
    wanted = {"--gpu-memory-utilization"} if engine == "vllm" else {"--max-total-tokens", "--mem-fraction-static"}
    assert limits & set(ENGINES[engine].command(shared, 1)) == wanted
    assert not limits & set(ENGINES[engine].command(shared.alone(), 1))
    on_cpu = replace(shared, device="cpu")
    assert on_cpu.alone() == on_cpu


def test_the_servers_of_the_demo_run_on_the_device_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choices, "check_device", lambda name: name)
    for options, device in (([], "cpu"), (["--device", "cuda"], "cuda")):
        specs = demo.server_specs(demo.parse(["--engine", "sglang", *options]), tmp_path, tmp_path)
        for spec in specs.values():
            command = ENGINES["sglang"].command(spec, 1)
            assert spec.device == command[command.index("--device") + 1] == device


def test_questions_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {question.group for question in read_questions(question_files())} == {"chat", "code", "maths"}


@pytest.mark.parametrize("main", [demo.main, serve.main])
def test_a_folder_without_a_checkpoint_is_refused(main, tmp_path, capsys):
    assert main(["--target", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no config.json there" in capsys.readouterr().out


def test_an_unknown_model_is_refused(tmp_path, capsys):
    assert demo.main(["--target", "no-such-model", "--out", str(tmp_path)]) == 2
    assert "no-such-model" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--max-tokens", "--threads", "--passes"])
def test_counts_below_one_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        demo.parse([flag, "0"])
    assert f"{flag} is 0, wanted at least 1" in capsys.readouterr().err


def test_each_engine_has_its_own_shapes():
    def own(*options: str) -> Shape:
        specs = demo.server_specs(demo.parse([*options, "--device", "cpu"]), Path("target"), Path("head"))
        return specs["builtin"].shape

    assert own() == (2, 4, 8) and own("--engine", "vllm") == (2, 1, 3) and own("--builtin", "4/1/5") == (4, 1, 5)
    assert ENGINES["sglang"].default_threads(2) == 2 and ENGINES["vllm"].default_threads(2) == 1
    assert ENGINES["vllm"].default_threads(1) == 1 and ENGINES["vllm"].default_threads(8) == 7
    given = demo.parse(["--engine", "vllm", "--topk", "3", "--builtin", "4"])
    assert given.builtin == (4, 1, 5)


def test_the_tree_is_the_engines_and_the_heads(tmp_path):
    """Deep for a head that drafts all levels in one forward; what is given stays."""
    recurrent, parallel = tmp_path / "eagle3", tmp_path / "peagle"
    for head, keys in ((recurrent, {}), (parallel, {"mask_token_id": 2})):
        head.mkdir()
        (head / "config.json").write_text(json.dumps(keys))

    def shape(head, *options):
        return demo.server_specs(demo.parse(options), tmp_path, head)["plugin"].shape

    assert shape(recurrent, "--engine", "sglang") == CPU_SHAPE == (2, 4, 8)
    assert shape(parallel, "--engine", "sglang") == (7, 4, 8)
    assert shape(recurrent, "--engine", "vllm") == (2, 4, 6) and shape(parallel, "--engine", "vllm") == (5, 4, 6)
    assert shape(recurrent, "--engine", "vllm", "--topk", "3") == (2, 3, 6)
    assert shape(parallel, "--engine", "sglang", "--steps", "3", "--draft-tokens", "9") == (3, 4, 9)
    specs = config_specs(ServerSpec(target=tmp_path, mode="plain", head=parallel, engine="vllm"))
    assert specs["plugin"].shape == specs["fixed"].shape == (5, 4, 6) and specs["builtin_chain"].shape == (2, 1, 3)


TP = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("demo", []),
        ("bench", []),
        ("bench-serving", ["--prompts", "chat"]),
        ("bench-serving --trace", []),
        ("benchmark", ["--sets", "shipped"]),
    ],
)
def test_flags_after_two_dashes_reach_every_server(name, more, any_head, tmp_path, monkeypatch, capsys):
    """Of all the servers that a comparison starts: the plain one has the same flags as those with drafts."""
    specs: dict[object, ServerSpec] = {}

    def stop(found: dict[object, ServerSpec], *_: object, **__: object) -> None:
        specs.update(found)
        raise ServerError("stopped")

    for folder in ("target", "head"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    monkeypatch.setattr(choices, "_is_installed", lambda engine: True)
    for module in (speed, sweep, cell_run, trace_command):
        monkeypatch.setattr(module, "serving", stop)
    positional = [str(tmp_path / "target")] if name == "benchmark" else ["--target", str(tmp_path / "target")]
    given = [*positional, "--head", str(tmp_path / "head"), "--engine", "vllm", "--device", "cpu"]
    assert main([*name.split(), *given, *more, "--out", str(tmp_path / "out"), "--", *TP]) == 2
    assert "stopped" in capsys.readouterr().out and specs
    for spec in specs.values():
        assert tuple(ENGINES["vllm"].command(spec, 1)[-2:]) == TP


@pytest.mark.parametrize("others", [0, 2, 4])
def test_the_servers_of_a_gpu_start_one_after_the_other_and_share_its_memory(others, tmp_path, monkeypatch):
    began: list[list[str]] = []
    given: dict[str, ServerSpec] = {}

    @contextlib.contextmanager
    def launched(specs, logs):
        began.append(list(specs))
        given.update(specs)
        yield dict.fromkeys(specs)

    monkeypatch.setattr(startup, "launched", launched)
    monkeypatch.setattr(startup, "wait_all", lambda *_: None)
    monkeypatch.setenv("EAGLE_PLUGIN", "force")

    def start(device, engine):
        began.clear()
        plain = ServerSpec(tmp_path, "plain", engine=engine, device=device)
        plugin = replace(plain, mode="plugin", head=tmp_path)
        specs = {"plugin": plugin, "plain": plain, "builtin": replace(plugin, mode="builtin", shape=Shape.chain(2))}
        with startup.serving(specs, tmp_path, Steps(Console()), others=others) as servers:
            assert list(servers) == list(specs)
        commands = [ENGINES[engine].command(spec, 1) for spec in given.values()]
        return [[part for part in names] for names in began if names], commands

    alone = [["plain"], ["builtin"], ["plugin"]]  # that whose policy measures costs is last
    found, commands = start("cuda", "vllm")
    assert found == alone
    parts = [float(args[args.index("--gpu-memory-utilization") + 1]) for args in commands]
    assert 0.89 < parts[0] * (3 + others) <= 0.9 and len(set(parts)) == 1
    found, commands = start("cuda", "sglang")
    assert found == alone
    for args in commands:  # of what the others have left
        assert float(args[args.index("--mem-fraction-static") + 1]) > 0.8 and "--max-total-tokens" in args
    assert start("cpu", "sglang")[0] == [["plain", "builtin"], ["plugin"]]


@pytest.mark.parametrize(
    ("architecture", "algorithm"),
    [("LlamaForCausalLMEagle", "EAGLE"), ("LlamaForCausalLMEagle3", "EAGLE3"), ("DFlashDraftModel", "DFLASH")],
)
def test_every_command_serves_the_kind_of_the_head(architecture, algorithm, any_head, tmp_path, monkeypatch):
    for folder in ("target", "head"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    target, head = tmp_path / "target", tmp_path / "head"
    named = ["--target", str(target), "--head", str(head), "--device", "cpu"]
    for engine, flag in (("sglang", "--speculative-algorithm"), ("vllm", "--speculative-config")):
        options = [*named, "--engine", engine]
        specs = [serve.server_spec(serve.parse(options), target)]
        specs += demo.server_specs(demo.parse(options), target, head).values()
        specs += config_specs(ServerSpec(target, "plain", head, engine=engine)).values()
        specs += state_specs(ServerSpec(target, "plain", engine=engine), head, head, "builtin").values()

        def stop(spec: ServerSpec, *_: object, found: list[ServerSpec] = specs) -> None:
            found.append(spec)
            raise ServerError("stopped")

        monkeypatch.setattr(loop_server.Server, "of", stop)
        with (
            pytest.raises(ServerError),
            loop_server.plugin_server(engine, target, head, 1, {}, "x", tmp_path, Steps(Console())),
        ):
            pass
        drafting = [spec for spec in specs if spec.mode != "plain"]
        assert len(drafting) > 6
        for spec in drafting:
            args = ENGINES[engine].command(spec, 1)
            found = args[args.index(flag) + 1]
            assert found == algorithm if engine == "sglang" else json.loads(found)["method"] == algorithm.lower()


def test_a_key_of_the_users_api_is_kept_by_serve_alone(tmp_path, monkeypatch):
    """The servers of a benchmark would refuse our own questions."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "VLLM_API_KEY" not in child_environment(ServerSpec(tmp_path, "plain", engine="vllm"), os.environ)
    spec = serve.server_spec(serve.parse(["--plain", "--engine", "vllm", "--device", "cpu"]), tmp_path)
    assert child_environment(spec, os.environ)["VLLM_API_KEY"] == "secret"


def test_the_context_of_serve(tmp_path):
    """2,048 tokens unless --context says otherwise; the cache of a CPU holds one such request."""
    found = serve.server_spec(serve.parse(["--plain", "--device", "cpu"]), tmp_path)
    assert (found.context_length, found.max_total_tokens) == (2048, 16384)
    found = serve.server_spec(serve.parse(["--plain", "--device", "cpu", "--context", "32768"]), tmp_path)
    assert found.context_length == 32768 < found.max_total_tokens


def test_the_plugin_in_vllm_on_a_gpu_is_forced_or_refused_at_once(tmp_path, monkeypatch):
    """Before a server loads its target: without EAGLE_PLUGIN=force vLLM's own worker would serve."""
    spec = ServerSpec(tmp_path, "plugin", tmp_path, engine="vllm", device="cuda")
    monkeypatch.delenv("EAGLE_PLUGIN", raising=False)
    with (
        pytest.raises(ValueError, match="in vLLM only with EAGLE_PLUGIN=force, found None: set it"),
        startup.serving({"plain": replace(spec, mode="plain"), "plugin": spec}, tmp_path / "logs", Steps(Console())),
    ):
        pass
    assert not (tmp_path / "logs").exists()
    assert child_environment(spec, {"EAGLE_PLUGIN": "force"})["EAGLE_PLUGIN"] == "force"
    child_environment(replace(spec, mode="plain"), {})
    child_environment(replace(spec, device="cpu"), {})
