"""What stops the start of vLLM with one sentence: wrong options, and a head's folder that does not fit its target."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from head_edits import config, put, tensors
from vllm_configs import configure
from vllm_forks import in_fork

from eagle_plugin.common.errors import UserError
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.kinds import HEADS
from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.vllm import plugin_config, support


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.tiny_llama(tmp_path_factory.mktemp("target"), head_dim=32)


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    return tiny_models.tiny_eagle3_head(tmp_path / "head", target)


def test_bad_options_stop_the_start(target: Path, head: Path) -> None:
    with pytest.raises(StartRefused, match=r"^eagle-plugin: .* unknown width; known are"):
        configure(target, head, additional_config={"eagle_plugin": {"width": 3}})
    with pytest.raises(UserError, match="depth 9 needs as many drafted tokens"):  # a program can catch it
        configure(target, head, additional_config={"eagle_plugin": {"depth": 9, "topk": 4}})


def test_an_unknown_policy_stops_the_start(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_POLICY", "fast")
    with pytest.raises(StartRefused, match=r"^eagle-plugin: EAGLE_POLICY is 'fast', wanted one of auto, fixed, random"):
        configure(target, head)
    monkeypatch.setenv("EAGLE_POLICY", "")
    assert plugin_config.is_served(configure(target, head).speculative_config)


def test_a_head_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    other = tiny_models.tiny_llama(tmp_path / "other", hidden=96, heads=6, kv_heads=2)
    wrong = tiny_models.tiny_eagle3_head(tmp_path / "wrong", other)
    with pytest.raises(StartRefused) as caught:
        configure(target, wrong)
    assert "96" in str(caught.value) and "64" in str(caught.value)


def test_a_head_with_nan_is_refused(target: Path, head: Path) -> None:
    tensors(lambda t: t["norm.weight"].fill_(float("nan")))(head)
    with pytest.raises(StartRefused, match=r"norm\.weight with 64 values that are not finite"):
        configure(target, head)


def test_parallel_drafting_of_another_head_is_refused(target: Path, head: Path, tmp_path: Path) -> None:
    asked = {"parallel_drafting": True}
    with pytest.raises(StartRefused, match=r"parallel_drafting true and the draft head .*head, wanted a P-EAGLE head"):
        configure(target, head, speculative=asked)
    eagle2 = tiny_models.tiny_eagle2_head(tmp_path / "eagle2", target)
    config(architectures=list(HEADS["eagle2"].architectures))(eagle2)  # the names of both engines
    with pytest.raises(StartRefused, match="method eagle3, and .* in its config.json; remove parallel_drafting"):
        configure(target, eagle2, method="eagle", speculative=asked)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_a_mask_that_is_half_there_is_refused(architecture: str, target: Path, head: Path) -> None:
    tensors(lambda t: t.update(mask_hidden=t["fc.weight"][:1].clone()))(head)
    config(pard_token=3, architectures=[architecture])(head)
    assert plugin_config.is_served(configure(target, head).speculative_config)
    config(pard_token=512)(head)
    with pytest.raises(StartRefused, match="mask_token_id 512, wanted 0 to 511; write the id of the token"):
        configure(target, head)
    config(pard_token="three")(head)
    with pytest.raises(StartRefused, match="has pard_token 'three', wanted a whole number"):
        configure(target, head)
    config(pard_token=3)(head)
    tensors(lambda t: t.pop("mask_hidden"))(head)
    with pytest.raises(StartRefused, match="pard_token 3 in config.json and no tensor mask_hidden"):
        configure(target, head)


def test_an_official_head_is_served_and_checked(target: Path, head: Path) -> None:
    """Its config.json names the class of a whole model, as the target's does; vLLM knows what is meant."""
    config(architectures=["LlamaForCausalLM"])(head)
    assert plugin_config.is_served(configure(target, head).speculative_config)
    config(num_hidden_layers=7)(head)
    with pytest.raises(StartRefused, match=r"num_hidden_layers 7 in config\.json and the weights of 1 layer"):
        configure(target, head)
    config(num_hidden_layers=1, hidden_size=128, target_hidden_size=...)(head)
    with pytest.raises(StartRefused, match="hidden_size 128, but the target's hidden_size is 64"):
        configure(target, head)
    config(hidden_size=64)(head)
    tensors(lambda t: t["norm.weight"].fill_(float("nan")))(head)
    with pytest.raises(StartRefused, match="not finite"):
        configure(target, head)
    shutil.copy(target / "config.json", head / "config.json")
    with pytest.raises(StartRefused, match=r"has the config\.json of the target"):
        configure(target, head)


def test_a_norm_before_the_residual_is_served(target: Path, head: Path) -> None:
    """vLLM's class reads the key and SGLang's does not, so `check_head` refuses it."""
    config(norm_before_residual=True)(head)
    with pytest.raises(HeadError, match="norm_before_residual true"):
        check_head(target, head, algorithm="EAGLE3")
    assert plugin_config.is_served(configure(target, head).speculative_config)


def test_a_bias_that_vllm_drops(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(support, "_log_once", lambda _level, line: lines.append(line))
    head = tiny_models.tiny_eagle2_head(tmp_path / "eagle2", target)
    config(architectures=list(HEADS["eagle2"].architectures))(head)
    put("fc.bias", torch.ones(64))(head)
    assert plugin_config.is_served(configure(target, head, method="eagle").speculative_config)
    assert any("fc.bias with values other than zero, which vLLM drops" in line for line in lines)


def test_what_vllm_refuses_itself_gets_our_sentence(target: Path, head: Path) -> None:
    """vLLM reads the head's config.json before the platform is asked."""
    with pytest.raises(Exception, match="num_speculative_tokens") as caught:  # vLLM's words: the files are right
        configure(target, head, speculative={"num_speculative_tokens": -1})
    assert not isinstance(caught.value, StartRefused)
    (head / "config.json").unlink()
    with pytest.raises(StartRefused, match=r"has no config\.json"):
        configure(target, head)


@pytest.mark.server
def test_the_sentence_is_printed_without_a_traceback(target: Path, head: Path) -> None:
    """By the command that users start, in a fork: its imports take longer than all else."""
    tensors(lambda t: t["norm.weight"].fill_(float("nan")))(head)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    command = ["serve", str(target), "--dtype", "float32", "--speculative-config", json.dumps(speculative)]
    code, output = in_fork(run_vllm, command)
    assert code == 1 and "Traceback" not in output
    assert output.strip().splitlines()[-1].startswith(f"eagle-plugin: {head} has norm.weight with 64 values")


def run_vllm(command: list[str]) -> None:
    sys.argv[1:] = command
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
