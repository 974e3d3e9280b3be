"""`eagle-plugin doctor` on start commands of vLLM: the verdict of its real parser and of the plugin's own checks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tiny_models

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.startup import StartRefused, engine_serves, plugin_serves
from eagle_plugin.runtime.verdict import CommandRefused, LogLines, Verdict, fault_of
from eagle_plugin.vllm import doctor, support


@pytest.fixture(autouse=True)
def logs_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is logged once per process, and these commands share one."""
    monkeypatch.setattr(support, "_logged", set())
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # as `doctor.main` sets it


def flags_of(target: Path, head: Path | None, *more: str, method: str = "eagle3") -> list[str]:
    given = {"method": method, "model": str(head), "num_speculative_tokens": 7}
    flags = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--num-gpu-blocks-override", "32"]
    speculative = ["--speculative-config", json.dumps(given)] if head else []
    return [str(target), *flags, "--block-size", "128", *speculative, *more]


def judge(*arguments: object, **options: str) -> Verdict:
    return judge_all(["serve", *flags_of(*arguments, **options)])  # type: ignore[arg-type]


def judge_all(arguments: list[str]) -> Verdict:
    logger = logging.getLogger(doctor.LOGGER)
    level, lines = logger.level, LogLines(logger)
    try:
        return doctor.judge(arguments, lines)
    finally:
        logger.removeFilter(lines)
        logger.setLevel(level)


def test_a_command_that_is_served(target: Path, head: Path) -> None:
    found = judge(target, head)
    assert found.serves == "plugin"
    assert found.sentence == plugin_serves("eagle3", Shape(2, 4, 8), "native")
    memory = {cost.what: cost.bytes for cost in found.memory}
    assert memory["the head's keys and values"] == 32 * 128 * 2 * 2 * 32 * 4
    assert memory["logits of the target for the trees"] == 2 * 8 * 512 * 4
    assert 0 < memory["the head's weights"] <= (head / "model.safetensors").stat().st_size
    module = judge_all(["--model", str(target), *flags_of(target, head)[1:]])  # of the API server, without `serve`
    assert (module.serves, module.sentence) == (found.serves, found.sentence)


def test_what_is_left_to_vllm_and_why(target: Path, head: Path) -> None:
    flag = judge(target, head, "--kv-cache-dtype", "fp8_inc")
    (reason,) = flag.reasons
    assert flag.serves == "engine" and reason.startswith("--kv-cache-dtype fp8_inc: only the model's own dtype")
    assert flag.sentence == engine_serves("eagle3", "vLLM", [reason]) and flag.warnings == []
    assert flag.changes == ["leave out --kv-cache-dtype, or give it a value that is served"]
    assert not any("logits" in cost.what for cost in flag.memory)
    ngram = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}']
    other = judge(target, None, *ngram)
    assert other.serves == "engine" and other.sentence.startswith("method ngram: vLLM's own speculation serves it")
    plain = judge(target, None)
    assert plain.serves == "plain" and "--speculative-config" in plain.changes[0]


def test_a_plugin_that_is_not_let_in(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "choose_worker", lambda config: None)  # vLLM has loaded the plugin in this process
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    dropped = judge(target, head)
    assert dropped.serves == "engine" and dropped.sentence.startswith("VLLM_PLUGINS is 'other' and does not name")
    assert dropped.changes == ["VLLM_PLUGINS=other,eagle_plugin, or unset it"]


def test_what_starts_no_server(target: Path, head: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandRefused, match=r"vLLM does not take the flags: unrecognized arguments: --treee"):
        judge(target, head, "--treee")
    with pytest.raises(CommandRefused, match="starts no server"):
        judge_all(["serve", "--help"])
    other = tiny_models.tiny_llama(tmp_path / "other", hidden=96, heads=3, kv_heads=3, head_dim=32)
    with pytest.raises(StartRefused, match="hidden_size is 96"):
        judge(other, head)
    with pytest.raises(UserError, match="unknown width"):
        judge(target, head, "--additional-config", '{"eagle_plugin": {"width": 3}}')
    with pytest.raises(Exception) as caught:
        judge(target, head, "--max-model-len", "100000")
    sentence = fault_of(caught.value)
    assert "100000" in sentence and "\n" not in sentence and "validation error" not in sentence
