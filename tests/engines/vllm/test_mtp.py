"""Targets whose own layers for multi-token prediction (MTP) draft trees in vLLM: text and distribution of plain
decoding, with the drafts of vLLM's own chain."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mtp_models
import pytest
import vllm_greedy
import vllm_requests
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm_bigram import draw
from vllm_configs import configure, needs
from vllm_engines import engine, generate, random_shapes, rounds, runner
from vllm_requests import check_aborts, check_distribution

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.files import HeadError
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.startup import plugin_serves
from eagle_plugin.runtime.verdict import LogLines
from eagle_plugin.vllm import doctor, draft_weights, mtp_support, support
from eagle_plugin.vllm.features import aux_layers_of
from eagle_plugin.vllm.head_exchange import exchange_head
from eagle_plugin.vllm.mtp_contract import MODELS
from eagle_plugin.vllm.plugin_config import plugin_config
from eagle_plugin.vllm.round_costs import RoundTimer
from eagle_plugin.vllm.round_test import RoundTest
from eagle_plugin.vllm.runner_choice import unserved_by_v2
from eagle_plugin.vllm.unsupported import unsupported_reasons

SETTINGS = [{"temperature": 1.0}, {"temperature": 0.5}]
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
CHUNKS = MANY | {"long_prefill_token_threshold": 32, "enable_prefix_caching": True}


FAMILIES = ["mimo", *(pytest.param(family, marks=pytest.mark.matrix) for family in mtp_models.FAMILIES)]


def prompts_of(family: str) -> list[list[int]]:
    return vllm_greedy.make_prompts(10) if family == "mimo" else vllm_requests.make_prompts(10)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_distribution(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trees of every shape, prompts in parts and from the prefix cache, aborts, sampling."""
    target, prompts = mtp_models.mtp_target(tmp_path, family), prompts_of(family)
    with engine(target, **MANY) as llm:
        expected, sampled = generate(llm, prompts), draw(llm, SETTINGS, 500)
    assert len({tuple(answer) for answer in expected}) > len(prompts) * 0.8, "equality would prove little"
    with engine(target, target, depth=3, topk=8, nodes=32, **CHUNKS) as llm:
        for _ in range(2):  # then from the prefix cache
            before = rounds(llm)
            assert generate(llm, prompts) == expected
            count, tokens = rounds(llm, before)
            assert tokens / count > (1.8 if family == "mimo" else 1.2)
        with random_shapes(llm):
            assert generate(llm, prompts) == expected
            check_aborts(llm, prompts, expected)
            check_distribution(llm, SETTINGS, sampled, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_is_that_of_vllm(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds for the same text: each draft reads what vLLM's own reads."""
    monkeypatch.setattr(draft_weights, "native_kernel", lambda: None)  # no weights of fewer bits
    target, prompts, found = mtp_models.mtp_target(tmp_path, family), prompts_of(family), []
    for chain in (False, True):
        with engine(target, target, depth=3, topk=1, nodes=4, chain=chain) as llm:
            found.append((generate(llm, prompts), rounds(llm)))
    assert found[0] == found[1]


def test_replays_self_test_and_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start does with a head, with these layers; they cannot be exchanged."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    target, prompts = mtp_models.mtp_target(tmp_path, "mimo"), prompts_of("mimo")
    with recording_launches(), engine(target, target, depth=3, topk=2, nodes=8) as llm:
        step, served = runner(llm)._step, runner(llm)
        replays = step.functions.replays
        replayed = generate(llm, prompts)
        assert step.functions.replays > replays + 20
        served._step = None
        assert generate(llm, prompts) == replayed
        served._step = step
        assert RoundTest(served).run() == []
        timer = RoundTimer(served, served._caps)
        assert (
            timer.target(2, 3, 16) > 0
            and timer.level(2, 2, 16) > 0
            and timer.extend(2, 3, 16) > 0
            and timer.prompt_token() > 0
        )
        with pytest.raises(HeadError, match="cannot take the place of MTP layers"):
            exchange_head(served, target)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_models.mtp_target(tmp_path_factory.mktemp("mimo"), "mimo")


@pytest.mark.parametrize("method", ["mtp", "mimo_mtp"])
def test_names_of_the_method(method: str, mimo: Path) -> None:
    """vLLM renames all others to mtp, and takes the target's folder for the layers."""
    config = configure(mimo, mimo, method=method, speculative={"model": None})
    assert config.speculative_config.method == mtp_support.METHOD
    assert plugin_config(config.speculative_config) is not None
    assert unserved_by_v2(config) == ["method mtp"]


def reason(config: Any) -> str:
    (found,) = unsupported_reasons(config)
    return found


def test_what_is_left_to_vllm(mimo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    config = configure(mimo, mimo, method="mtp")
    assert unsupported_reasons(config) == []
    config.speculative_config.draft_model_config.hf_config.n_predict = 2
    assert reason(config) == (
        "MTP layers MiMoMTPModel: the checkpoint has 2, only one, which drafts every level, is served yet"
    )
    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "architecture", "DeepSeekMTPModel")
        assert reason(config).startswith("MTP layers DeepSeekMTPModel: only MiMoMTPModel, Qwen3NextMTP, ")
    target = mtp_models.mtp_target(tmp_path, "glm4_moe")
    config = configure(target, target, method="mtp")
    assert unsupported_reasons(config) == []
    needs("parallel_config", "data_parallel_size", 2)(config)
    assert any(why.startswith("--data-parallel-size: it is not served with MTP") for why in unsupported_reasons(config))


def test_a_checkpoint_with_several_layers(tmp_path: Path, lines: list[str]) -> None:
    """The log says why the server has vLLM's own chain."""
    target = mtp_models.mtp_target(tmp_path, "mimo")
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 2}))
    config = configure(target, target, method="mtp", speculative={"num_speculative_tokens": 4})
    assert plugin_config(config.speculative_config) is None
    assert any("mtp is served by vLLM's own worker: MTP layers MiMoMTPModel: the checkpoint has 2" in x for x in lines)


def test_doctor(mimo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_logged", set())
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    flags = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--num-gpu-blocks-override", "32"]
    method = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 7})]
    logger = logging.getLogger(doctor.LOGGER)
    lines = LogLines(logger)
    try:
        found = doctor.judge(["serve", str(mimo), *flags, *method], lines)
    finally:
        logger.removeFilter(lines)
    assert found.serves == "plugin"
    assert found.sentence == plugin_serves("mtp", Shape(2, 4, 8), "native")


def test_contract() -> None:
    """The classes of vLLM's registry give one state for both; a target that drafts so hands out its last states."""
    for name, path in MODELS.items():
        loaded = ModelRegistry.models[name].load_model_cls()
        assert f"{loaded.__module__}.{loaded.__qualname__}" == path
    proposer = SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(hf_config=SimpleNamespace()))
    for name in mtp_support.SERVED:
        proposer.draft_model_config.hf_config.architectures = [name]
        assert not EagleProposer.model_returns_tuple(proposer)
    assert tuple(MODELS) == mtp_support.SERVED and aux_layers_of(SimpleNamespace(), mtp_support.METHOD) == ()


@pytest.mark.matrix
def test_text_of_a_compiled_engine(tmp_path: Path) -> None:
    """The last test (test_linear_attention.py says why): a target with positions of three axes, as vLLM compiles it.

    Without drafts vLLM decodes such a target in bfloat16 alone; test_multimodal.py compares its text.
    """
    target, prompts = mtp_models.mtp_target(tmp_path, "qwen3_5"), prompts_of("qwen3_5")
    options = {"depth": 3, "topk": 8, "nodes": 32, "gpu_memory_utilization": 0.3}
    with engine(target, target, **options) as llm:
        expected = generate(llm, prompts)
    with engine(target, target, **options, enforce_eager=False) as llm:
        before = rounds(llm)
        assert generate(llm, prompts) == expected
        count, tokens = rounds(llm, before)
        assert tokens / count > 1.2
