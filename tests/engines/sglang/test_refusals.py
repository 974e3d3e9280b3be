"""What the plugin refuses, what it leaves to the engine's own worker, and that it can be switched off."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from head_edits import config, put, tensors, with_mask
from safetensors.torch import load_file
from serving import generate, serving, tiny_spec
from tiny_models import tiny_eagle3_head, tiny_llama
from wild_heads import write
from wild_layouts import LAYOUTS

from eagle_plugin.bench.servers import child_environment
from eagle_plugin.bench.sglang_server import command
from eagle_plugin.core.shape import Shape

pytest.importorskip("sglang")
from sglang_flags import SERVED

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.runtime.startup import LEFT
from eagle_plugin.sglang import plugin, support, version


def test_an_unknown_engine_version_is_left_untouched(monkeypatch, caplog):
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setattr(version.metadata, "version", lambda name: "0.6.1")
    plugin.register()
    assert not registered
    assert "0.6.1" in caplog.text and version.TESTED[0] in caplog.text


def test_the_environment_variable_switches_the_plugin_off(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    plugin.register()
    assert not registered
    monkeypatch.setenv("EAGLE_PLUGIN", "1")
    plugin.register()
    assert [target for target, _, _ in registered] == [
        plugin.CREATE_WORKER, plugin.RESOLVE_ARGUMENTS, plugin.RESOLVE_BLOCK_ARGUMENTS, plugin.RESOLVE_MARKOV_ARGUMENTS,
        plugin.AUTO_PARAMETERS, plugin.ROW_ROOM, plugin.DECODE_ROOM,
        *(f"{plugin.WEIGHT_UPDATES}.update_weights_from_{way}" for way in ("disk", "ipc", "tensor", "distributed")),
        *(f"{plugin.WEIGHT_UPDATES}.{step}_weight_update" for step in ("begin", "end")),
        plugin.CHECK_REQUEST, plugin.PREPARE_ARGUMENTS,
    ]  # fmt: skip
    assert all(callable(hook) and hook.__module__ == plugin.__name__ for _, hook, _ in registered)


def launch(target: Path, head: Path, algorithm: str = "EAGLE3") -> subprocess.CompletedProcess[str]:
    spec = tiny_spec(target, head, algorithm=algorithm)
    return subprocess.run(
        command(spec, 1), env=child_environment(spec, os.environ), capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def check_launch(monkeypatch):
    """check_launch with the flags of a plain server for a target and a head's folder."""
    from sglang.srt.arg_groups import model_override_base

    from eagle_plugin.sglang import preflight

    monkeypatch.setattr(model_override_base, "resolved_view", lambda arguments: arguments)

    def check(target: Path, head: Path, algorithm: str = "EAGLE3", **flags: str | bool) -> None:
        folders = {"model_path": str(target), "speculative_draft_model_path": str(head)}
        preflight.check_launch(SimpleNamespace(**SERVED | folders | {"speculative_algorithm": algorithm} | flags))

    return check


def test_a_head_with_latent_attention_is_left_to_sglang(check_launch, tiny_target, tmp_path):
    """`check` refuses it by name; SGLang has a class for it."""
    head = write(LAYOUTS["ModelOpt, Kimi K2"], tmp_path / "head", tiny_target)
    check_launch(tiny_target, head)
    assert LEFT not in os.environ
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]), is_encoder_decoder=False, attention_arch=None
    )
    model = SimpleNamespace(modules=list)
    runner = SimpleNamespace(model_config=config, model=model, sampler=Sampler())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda config: None)
        (reason,) = support.unsupported_models(runner, "Eagle3DeepseekV2ForCausalLM")
    assert reason.startswith("draft head Eagle3DeepseekV2ForCausalLM: not one of LlamaForCausalLMEagle")
    with pytest.raises(HeadError, match="multi-head latent attention .*serve them without the plugin"):
        check_head(tiny_target, head, algorithm="EAGLE3")


class Sampler:
    """By its name the engine's own."""


def test_a_head_folder_with_another_models_config_is_checked(check_launch, tiny_target, tiny_eagle3, tmp_path):
    """Whatever class it names, unless the engine has a class of its own for such draft heads."""
    check_launch(tiny_target, tiny_eagle3)
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", None):
        head = tmp_path / str(name)
        shutil.copytree(tiny_eagle3, head)
        written = json.loads((tiny_target / "config.json").read_text()) | {"architectures": name and [name]}
        (head / "config.json").write_text(json.dumps(written))
        with pytest.raises(SystemExit, match="eagle-plugin: .* is not a Llama draft head"):
            check_launch(tiny_target, head)
    (head / "config.json").write_text(json.dumps(written | {"architectures": ["DeepseekV3ForCausalLM"]}))
    check_launch(tiny_target, head)


@pytest.mark.parametrize(("name", "value"), [("EAGLE_POLICY", "fast"), ("EAGLE_POLICY_LOG_SECONDS", "often")])
def test_wrong_settings_of_the_policy_are_refused(name, value, check_launch, tiny_target, tiny_eagle3, monkeypatch):
    check_launch(tiny_target, tiny_eagle3)
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"^eagle-plugin: {name} is '{value}', wanted"):
        check_launch(tiny_target, tiny_eagle3)


def test_a_head_with_nan_is_refused(check_launch, tiny_target, tiny_eagle3, tmp_path):
    head = tmp_path / "head"
    shutil.copytree(tiny_eagle3, head)
    tensors(lambda t: t["norm.weight"].fill_(float("nan")))(head)
    with pytest.raises(SystemExit, match=r"eagle-plugin: .* norm\.weight with 64 values that are not finite"):
        check_launch(tiny_target, head)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH"])
def test_a_head_whose_weights_are_not_in_its_folder(algorithm, check_launch, tiny_target, tiny_eagle3, tmp_path):
    """`--load-format dummy` is for a profile without weights: config.json is enough for SGLang."""
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(tiny_eagle3 / "config.json", head)
    with pytest.raises(SystemExit, match=r"^eagle-plugin: .*/head has no weights|is no block drafter"):
        check_launch(tiny_target, head, algorithm)
    check_launch(tiny_target, head, algorithm, load_format="dummy")
    check_launch(tiny_target, head, algorithm, speculative_draft_load_format="dummy")
    with pytest.raises(SystemExit):
        check_launch(tiny_target, head, algorithm, load_format="dummy", speculative_draft_load_format="auto")


def test_what_sglang_serves_never_ends_the_start(check_launch, tiny_target, tiny_eagle3, tmp_path, caplog, monkeypatch):
    """What it reads otherwise than meant is a warning; what only its own worker serves is left to that one."""
    key = "eagle_aux_hidden_state_layer_ids"
    misread = {
        "norm_before_residual true": config(norm_before_residual=True),
        "tie_word_embeddings true": config(tie_word_embeddings=True),
        "draft_vocab_size null": config(draft_vocab_size=None),
        "at the top level": config(**{key: [1, 3, 5]}),
        "q_proj.bias": put("midlayer.self_attn.q_proj.bias", torch.ones(64)),
        "a norm of queries or keys": put("midlayer.self_attn.q_norm.weight", torch.ones(16)),
        "aux layer ids [4, 2, 1]": config(eagle_config={key: [4, 2, 1]}),
    }
    monkeypatch.delenv(LEFT, raising=False)
    for number, (phrase, edit) in enumerate(misread.items()):
        head = tmp_path / str(number)
        shutil.copytree(tiny_eagle3, head)
        edit(head)
        caplog.clear()
        with pytest.raises(HeadError, match=re.escape(phrase)):  # `eagle-plugin check` says no
            check_head(tiny_target, head, algorithm="EAGLE3")
        check_launch(tiny_target, head)
        assert phrase in caplog.text and LEFT not in os.environ
    put("d2t", torch.tensor([1] + [0] * 511))(head)
    check_launch(tiny_target, head)
    assert "d2t that maps 512 draft ids to 511 target ids" in os.environ[LEFT]
    monkeypatch.setattr(support, "unsupported_flags", lambda _: [])
    for what in ("cache", "models", "chunks", "states", "models_beside", "block_drafters"):
        monkeypatch.setattr(support, f"unsupported_{what}", lambda *_: [])
    draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle3"]))
    runner = SimpleNamespace(spec_aux_config=SimpleNamespace(draft_model_config=draft), device="cpu", lora_manager=None)
    served = SimpleNamespace(**SERVED)
    assert support.unsupported_reasons(served, runner) == [os.environ[LEFT]]
    check_launch(tiny_target, tiny_eagle3)  # of the next engine in this process
    assert support.unsupported_reasons(served, runner) == []
    runner.spec_aux_config.draft_model_config = None
    (reason,) = support.unsupported_reasons(served, runner)
    assert reason.startswith("--speculative-draft-model-path is not given")


def test_a_pickle_is_served_with_a_warning_that_has_the_command_that_converts_it(
    check_launch, tiny_target, tiny_eagle3, tmp_path, monkeypatch, caplog
):
    """SGLang loads it; `eagle-plugin check` says no, and once the command of the sentence has run it looks at it."""
    monkeypatch.delenv(LEFT, raising=False)
    head = tmp_path / "a 'head'"
    shutil.copytree(tiny_eagle3, head)
    weights = load_file(head / "model.safetensors")
    torch.save(weights, head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    with pytest.raises(HeadError, match=r"has only pytorch_model\.bin, wanted model\.safetensors"):
        check_head(tiny_target, head, algorithm="EAGLE3")
    check_launch(tiny_target, head)
    assert LEFT not in os.environ
    (line,) = [line for line in caplog.messages if "has only pytorch_model.bin: the engine loads" in line]
    command = line.partition("which runs no code of theirs: ")[2].replace("python", sys.executable, 1)
    caplog.clear()
    subprocess.run(command, shell=True, check=True)
    assert all(map(torch.equal, load_file(head / "model.safetensors").values(), weights.values()))
    check_launch(tiny_target, head)
    assert LEFT not in os.environ and not caplog.messages


def test_a_leftover_quantisation_ends_the_start_on_a_cpu(check_launch, tiny_target, tiny_eagle3, tmp_path, caplog):
    head = tmp_path / "head"
    shutil.copytree(tiny_eagle3, head)
    config(quantization_config={"quant_method": "fp8"})(head)
    with pytest.raises(SystemExit, match=r"^eagle-plugin: .* has a quantization_config .*; remove the key"):
        check_launch(tiny_target, head)


def test_fewer_trained_levels_than_steps_are_logged(check_launch, tiny_target, tiny_eagle3, tmp_path, caplog):
    head = tmp_path / "head"
    shutil.copytree(tiny_eagle3, head)
    record = {"format": 1, "kind": "peagle", "aux_layers": [2, 3, 4], "target": {}}

    def trained_for(levels: int) -> str:
        caplog.clear()
        training = {"recipe": {"phases": [{"steps": 1}, {"steps": levels}]}}
        (head / "eagle_plugin.json").write_text(json.dumps(record | {"training": training}))
        check_launch(tiny_target, head)
        return caplog.text

    assert "trained to draft" not in trained_for(2)  # an EAGLE-3 head drafts as many levels as one likes
    with_mask(head)
    assert "was trained to draft 2 tokens in one forward, so its trees have 2 levels and not 3" in trained_for(2)
    assert "trained to draft" not in trained_for(3)
    assert Shape(3, 2, 11).within_steps(2) == Shape(2, 2, 7) and Shape(3, 2, 5).within_steps(2) == Shape(2, 2, 5)


@pytest.mark.parametrize(
    ("flags", "is_lost"),
    [
        ((), False),
        (("enable_memory_saver",), True),
        (("enable_memory_saver", "enable_draft_weights_cpu_backup"), False),
        (("enable_memory_saver", "enable_weights_cpu_backup"), False),
    ],
)
def test_a_head_that_a_release_of_memory_drops(flags, is_lost, check_launch, tiny_target, tiny_eagle3, caplog):
    check_launch(tiny_target, tiny_eagle3, **dict.fromkeys(flags, True))
    assert ("add --enable-draft-weights-cpu-backup" in caplog.text) == is_lost


def test_a_mask_that_is_half_there_is_refused(check_launch, tiny_target, tiny_eagle3, tmp_path):
    token, features = tmp_path / "token", tmp_path / "features"
    for head in (token, features):
        shutil.copytree(tiny_eagle3, head)
        with_mask(head)
        check_launch(tiny_target, head)
    tensors(lambda t: t.pop("mask_hidden"))(token)
    with pytest.raises(SystemExit, match="eagle-plugin: .* mask_token_id 3 in config.json and no tensor mask_hidden"):
        check_launch(tiny_target, token)
    config(mask_token_id=512)(features)
    with pytest.raises(SystemExit, match="eagle-plugin: .* mask_hidden and mask_token_id 512, wanted 0 to 511"):
        check_launch(tiny_target, features)


def test_a_head_that_its_own_class_refuses_ends_the_start_in_one_sentence(monkeypatch):
    """Of a model hub: nothing was checked before it was loaded."""
    from eagle_plugin.sglang import eagle3_model, selftest, worker

    def refuse(**arguments: object) -> None:
        raise HeadError("the draft head has no mask")

    monkeypatch.setattr(support, "unsupported_reasons", lambda *_: [])
    monkeypatch.setattr(support, "rank_logger", lambda logger: logger)  # the engine's groups do not exist yet
    monkeypatch.setattr(selftest, "failed_kernels", lambda _: [])
    monkeypatch.setattr(eagle3_model, "register", lambda: None)
    monkeypatch.setattr(worker, "TreeWorker", refuse)
    create = support.worker_factory("EAGLE3", object)
    with pytest.raises(SystemExit, match="^eagle-plugin: the draft head has no mask$"):
        create(None, 0, 0, SimpleNamespace(model_runner=None))


@pytest.mark.server
@pytest.mark.matrix  # test_server_forks.py has it of a fork
def test_a_head_of_another_target_is_refused_in_one_sentence(tiny_target, tmp_path):
    other = tiny_llama(tmp_path / "other", hidden=96, heads=6, kv_heads=2)
    head = tiny_eagle3_head(tmp_path / "head", other)
    result = launch(tiny_target, head)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("eagle-plugin: ")
    assert "96" in last and "64" in last  # what was found and what was wanted
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_safetensors_is_refused(check_launch, tiny_target, tiny_eagle3, tmp_path):
    """As test_a_head_of_another_target_is_refused_in_one_sentence, which shows what a launch makes of the exception."""
    head = tmp_path / "head"
    shutil.copytree(tiny_eagle3, head)
    (head / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(SystemExit, match=r"^eagle-plugin: [^\n]*model\.safetensors[^\n]*$"):
        check_launch(tiny_target, head)


@pytest.mark.server
def test_a_flag_that_is_not_served_falls_back_and_says_so(tiny_target, tiny_eagle3, tmp_path):
    """The engine's own worker serves, on the same kernels, and the log names the flag."""
    spec = tiny_spec(
        tiny_target,
        tiny_eagle3,
        mode="builtin",  # the mode that check_worker() expects to find ...
        environment={"EAGLE_PLUGIN": "1"},  # ... although the plugin is on
        extra_flags=("--skip-server-warmup", "--speculative-accept-threshold-single", "0.9"),
    )
    with serving([spec], tmp_path) as (server,):
        assert len(generate(server, "tree", 8)["output_ids"]) == 8
        lines = [line for line in server.log_text().splitlines() if "eagle-plugin" in line]
    assert any("served by SGLang's own worker" in line and "accept-threshold-single" in line for line in lines)


@pytest.mark.server
@pytest.mark.matrix  # what a launch makes of the check is shown above; this is a head that drafts at random
def test_a_head_without_weights_serves(tiny_target, tiny_eagle3, tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(tiny_eagle3 / "config.json", head)
    spec = tiny_spec(tiny_target, head, extra_flags=("--speculative-draft-load-format", "dummy"))
    with serving([spec], tmp_path) as (server,):
        assert len(generate(server, "tree", 8)["output_ids"]) == 8


def test_the_module_needs_no_engine_to_be_imported():
    """The entry point is imported in processes where the engine's modules must not be loaded early."""
    code = "import sys, eagle_plugin.sglang.plugin; sys.exit('sglang' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
