"""The check before serving: drafts that are right pass; a foreign head and shifted aux layers are found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import dflash_models
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from eagle_plugin.cli import main
from eagle_plugin.heads.create import continue_as
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.evaluate import check as check_module
from eagle_plugin.learning.evaluate import eval_command
from eagle_plugin.learning.evaluate.check import check

PROMPTS = ["hello", "What is the capital of France?", "1 2 3 4"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "check-cache"))


def test_good_head_passes(markov_target: Path, markov_eagle2: Path, markov_eagle3_reduced: Path) -> None:
    for head, algorithm in ((markov_eagle2, "EAGLE"), (markov_eagle3_reduced, "EAGLE3")):
        report = check(markov_target, head, prompts=PROMPTS)
        assert report.info.algorithm == algorithm and report.others == [] and report.trained is None
        assert report.warnings == []
        assert report.served.stats.cumulative == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(
    ("options", "free", "device"),
    [([], 2**40, "cuda"), ([], 0, "cpu"), ([], None, "cpu"), (["--device", "cpu"], 2**40, "cpu")],
)
def test_target_and_head_compute_on_a_gpu_that_has_room(
    options, free, device, markov_target, markov_eagle3, tmp_path, monkeypatch
) -> None:
    """Jobs name no device, so that check and evaluation follow the machine."""
    used: list[str] = []

    def stop(*_: object, **more: object) -> None:
        used.append(str(more["device"]))
        raise HeadError("stopped")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: free is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    monkeypatch.setattr(check_module, "check", stop)
    assert main(["check", str(markov_target), str(markov_eagle3), *options]) == 2
    monkeypatch.setattr(check_module, "check_block_drafter", lambda t, h, device, report: stop(device=device))
    drafter = dflash_models.tiny_dflash(tmp_path / "drafter", markov_target)
    assert main(["check", str(markov_target), str(drafter), *options]) == 2
    monkeypatch.setattr(eval_command, "fast_dtype", lambda device: stop(device=device))
    assert main(["eval", str(markov_target), str(markov_eagle3), *options]) == 2
    assert used == [device] * 3


@pytest.mark.parametrize(
    ("command", "owner", "name"),
    [
        ("check", torch.nn.Module, "to"),
        ("check", check_module, "check"),
        ("eval", torch.nn.Module, "to"),
        ("eval", eval_command, "measure"),
    ],
)
def test_a_gpu_that_runs_out_of_memory_is_one_sentence(
    command, owner, name, markov_target, markov_eagle3, monkeypatch, capsys
) -> None:
    """While the target goes to it, and later."""

    def lack(*_: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr(owner, name, lack)
    assert main([command, str(markov_target), str(markov_eagle3), "--device", "cpu"]) == 2
    printed = capsys.readouterr().err
    assert "error: the memory of cpu ran out (CUDA out of memory. Tried to allocate 2.00 GiB); end what" in printed
    assert "--device cpu" in printed and "Traceback" not in printed


def test_a_peagle_head_is_recognised(
    markov_target: Path, markov_eagle3_reduced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is right in its first draft, as the head that it starts from, and its untrained masked rows are not."""
    start = load_any_head(markov_eagle3_reduced, markov_target)
    head = continue_as("peagle", start, markov_target, layers=2, mask_token_id=2)
    save_head(head, tmp_path / "head", target_dir=markov_target)
    report = check(markov_target, tmp_path / "head", prompts=PROMPTS)
    assert report.info.kind == "peagle" and report.info.num_layers == 2
    assert report.served.stats.cumulative[0] == 1.0 > 0.5 > report.served.stats.cumulative[1]
    found = tmp_path / "check.json"
    for folder, kind in ((tmp_path / "head", "peagle"), (markov_eagle3_reduced, "eagle3")):
        assert main(["check", str(markov_target), str(folder), "--json", str(found)]) == 0
        printed = capsys.readouterr().out
        assert f"kind               {kind}\n" in printed and "not seen           a rope_theta other than" in printed
        written = json.loads(found.read_text())
        assert written["kind"] == kind and written["cumulative"][0] == 1.0


def test_heads_by_the_rules_of_vllm(
    markov_target: Path, markov_eagle3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head that only vLLM serves is measured where its drafts can be computed here, and where not it says why."""
    command = ["check", str(markov_target)]
    aux = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    for keys, drafts in ((aux, "first draft right for 100.0%"), ({"norm_before_residual": True}, "not measured: ")):
        folder = tmp_path / "-".join(keys)
        shutil.copytree(markov_eagle3, folder)
        (folder / "eagle_plugin.json").unlink(missing_ok=True)
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | keys))
        assert main([*command, str(folder)]) == 2
        assert "; vLLM serves it as it is (eagle-plugin check --engine vllm)" in capsys.readouterr().err
        assert main([*command, str(folder), "--engine", "vllm"]) == 0
        printed = capsys.readouterr().out
        assert f"drafts             {drafts}" in printed and ("norm_before_residual" in printed) == (keys is not aux)


def test_head_of_another_target_is_refused(markov_target: Path, tmp_path: Path) -> None:
    """It fits by every size and name, and drafts nothing that this target says."""
    other = tiny_models.markov_target(tmp_path / "other", seed=9)
    head = tiny_models.markov_eagle3_head(tmp_path / "head", other)
    assert check(other, head, prompts=PROMPTS).served.stats.accept_length > 4.9
    with pytest.raises(HeadError, match="trained for another target"):
        check(markov_target, head, prompts=PROMPTS)


def test_head_far_below_its_training_is_refused(markov_target: Path, tmp_path: Path) -> None:
    poor = load_any_head(tiny_models.markov_eagle3_head(tmp_path / "poor", markov_target, wrong=0.7), markov_target)
    for measured, fits in (([0.35, 0.3], True), ([0.95, 0.9], False)):
        folder = tmp_path / f"head-{fits}"
        save_head(poor, folder, target_dir=markov_target, manifest={"acceptance": measured})
        if fits:
            assert check(markov_target, folder, prompts=PROMPTS).trained == 0.35
        else:
            with pytest.raises(HeadError, match="but was for 95.0% in training"):
                check(markov_target, folder, prompts=PROMPTS)


@pytest.fixture(scope="module")
def stepping_target(markov_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Markov target with its step in layer 3: before it the stream is the unit vector of v, after it of f(v)."""
    folder = tmp_path_factory.mktemp("stepping") / "target"
    shutil.copytree(markov_target, folder)
    weights = load_file(folder / "model.safetensors")
    vocab = len(weights["lm_head.weight"])
    eye = torch.eye(vocab)
    length = torch.tensor(1.0 / (1.0 / vocab + 1e-5) ** 0.5)
    mlp = "model.layers.3.mlp"
    weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"] = eye, eye.clone()
    weights[f"{mlp}.down_proj.weight"] = (weights["lm_head.weight"] - eye) / (torch.nn.functional.silu(length) * length)
    weights["model.layers.3.post_attention_layernorm.weight"] = torch.ones(vocab)
    weights["lm_head.weight"] = eye.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stepping_head(folder: Path, markov_target: Path, ids: list[int]) -> Path:
    """A head that reads the input of layer 3 only, third of its aux layers; ids as SGLang's key holds them."""
    tiny_models.markov_eagle3_head(folder, markov_target)
    weights = load_file(folder / "model.safetensors")
    eye = torch.eye(weights["fc.weight"].shape[0])
    weights["fc.weight"] = torch.cat([0 * eye, 0 * eye, eye], 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_shifted_aux_layers_are_found(stepping_target: Path, markov_target: Path, tmp_path: Path) -> None:
    """SGLang captures the input of layer id + 1: ids 0,1,2 are right for this head, ids 1,2,3 are vLLM's for it."""
    right = stepping_head(tmp_path / "right", markov_target, [0, 1, 2])
    report = check(stepping_target, right, prompts=PROMPTS)
    assert report.served.interpretation.aux_layers == (1, 2, 3) and report.served.stats.accept_length > 4.9
    assert [other.interpretation.aux_layers for other in report.others] == [(0, 1, 2)]
    assert any("do not decide which" in warning for warning in report.warnings)  # layers 2 and 3 read the same stream

    wrong = stepping_head(tmp_path / "wrong", markov_target, [1, 2, 3])
    with pytest.raises(HeadError) as refused:
        check(stepping_target, wrong, prompts=PROMPTS)
    assert "was trained on the inputs of layers 1, 2, 3 (vLLM's ids" in str(refused.value)
    assert "--aux-layers 1,2,3" in str(refused.value)


def test_layers_that_no_key_names_are_found(stepping_target: Path, markov_target: Path, tmp_path: Path) -> None:
    """The same wrong layers in both conventions: nothing in config.json says what the head was trained on."""
    wrong = stepping_head(tmp_path / "wrong", markov_target, [3, 4, 5])
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [4, 5, 6]}))
    with pytest.raises(HeadError) as refused:
        check(stepping_target, wrong, prompts=PROMPTS)
    message = str(refused.value)
    assert (
        "trained on the inputs of layers 1, 2, 3 (the engines' default, one layer lower; first draft right" in message
    )
    assert "would give it the inputs of layers 4, 5, 6" in message and "--aux-layers 1,2,3 --norm-output no" in message
    command = ["export", str(wrong), str(tmp_path / "new"), "--target", str(stepping_target)]
    assert main([*command, "--aux-layers", "1,2,3", "--norm-output", "no"]) == 0  # the command of the message
    assert check(stepping_target, tmp_path / "new", prompts=PROMPTS).served.stats.accept_length > 4.9


def test_a_block_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is described, and its drafts are measured: those of a random one are refused."""
    target = tiny_models.tiny_llama(tmp_path / "target", head_dim=32)
    head, found = dflash_models.tiny_dflash(tmp_path / "head", target, block=8), tmp_path / "check.json"
    assert main(["check", str(target), str(head), "--files-only", "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    for line in (
        "kind               dflash (block drafter)",
        'vLLM               "method": "dflash" in --speculative-config',
        "SGLang             --speculative-algorithm DFLASH",
        "block              8 tokens, of which 7 are drafted",
        "aux hidden states  outputs of target layers 1, 3, 5, counted from 0",
    ):
        assert line + "\n" in printed
    assert json.loads(found.read_text())["block"] == 8
    files_only = ["check", str(target), str(head), "--files-only"]
    assert main([*files_only, "--engine", "sglang"]) == 0
    printed = capsys.readouterr().out
    assert "--speculative-algorithm DFLASH" in printed and "vLLM" not in printed
    assert main(["check", str(target), str(head), "--algorithm", "EAGLE3"]) == 2
    assert "is a block drafter" in capsys.readouterr().err
    assert main(["check", str(target), str(head)]) == 2
    assert f"the first draft of {head} is right for 0." in capsys.readouterr().err
    last = json.loads((head / "config.json").read_text())
    last["dflash_config"]["target_layer_ids"] = [1, 3, 6]  # SGLang does not keep the output of the last layer
    (head / "config.json").write_text(json.dumps(last))
    assert main(files_only) == 0
    printed = capsys.readouterr().out
    assert '"method": "dflash"' in printed and "target_layer_ids with 6" in printed
    assert main([*files_only, "--engine", "sglang"]) == 2
    assert "target_layer_ids with 6" in capsys.readouterr().err
