"""Targets by vLLM's own kernels for CPUs with AMX: quantised ones, and what of latent attention (MLA) is served there.

The kernels take bfloat16 alone, and some of them round the inputs of a layer to eight bits. Another order of a sum then
parts texts where two tokens are nearly as likely, so that greedy tokens are compared with the best one of plain
decoding, and sampled text with its distribution, as in test_quantised.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_models import family_head, family_target, sampling_settings
from quantised_models import quantise
from vllm import LLM
from vllm_bigram import draw
from vllm_configs import configure
from vllm_engines import engine, generate, rounds
from vllm_requests import check_distribution, losses, make_prompts

from eagle_plugin.vllm import unsupported

pytestmark = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
MATRIX = pytest.mark.matrix
TOKENS = 32
PROMPTS = make_prompts(8)
# As in vllm_requests.py, but the logits are bfloat16 too: numbers from 8 to 16 are rounded to sixteenths.
ROUNDING = 0.75
TREES: dict[str, Any] = {"depth": 3, "topk": 8, "nodes": 32}
# Blocks of 128 x 128 numbers share a scale, and no block holds parts of two projections.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
# Two experts that are nearly as likely are another sum, not a rounding: no token leaves out one of the four.
ALL_EXPERTS = {"num_experts_per_tok": 4}


class Case(NamedTuple):
    """A format of tests/support/quantised_models.py, and the operator that multiplies by its weights."""

    name: str
    operator: str
    family: str = "llama"
    changes: dict[str, int] = {}  # noqa: RUF012
    int4_inputs: str = "1"  # VLLM_CPU_INT4_W4A8: inputs beside weights of four bits are rounded to eight


ALWAYS = [Case("mxfp4", "_C::fused_experts_cpu", "gpt_oss", ALL_EXPERTS), Case("gptq", "_C::int4_scaled_mm_cpu")]
OTHERS = [
    Case("fp8-block-128", "_C::fp8_scaled_mm_cpu", changes=WIDE),
    Case("modelopt-fp8", "_C::fp8_scaled_mm_cpu"),
    Case("w8a8-int8", "_C::int8_scaled_mm_with_quant"),
    Case("awq", "_C::int4_scaled_mm_cpu"),
    Case("w4a16", "_C::int4_scaled_mm_cpu"),
    Case("w4a16", "_C::cpu_gemm_wna16", int4_inputs="0"),
]
CASES = [*ALWAYS, *(pytest.param(case, marks=MATRIX) for case in OTHERS)]


def operators(llm: LLM) -> set[str]:
    """The operators that a short answer calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generate(llm, PROMPTS[:1], max_tokens=2)
    return {event.key for event in profile.key_averages()}


def check_tokens(llm: LLM, found: list[list[int]]) -> None:
    """Greedy answers to PROMPTS are those of plain decoding within rounding; the control: answers to other prompts."""
    ours, others = (losses(llm, PROMPTS, answers) for answers in (found, found[1:] + found[:1]))
    assert max(ours) < ROUNDING < max(others), (max(ours), max(others))
    assert sum(loss == 0 for loss in ours) > len(ours) * 0.9


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} by {case.operator}")
def test_greedy_text(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", case.int4_inputs)
    plain = family_target(tmp_path / "plain", case.family, **case.changes)
    target, head = quantise(tmp_path / "target", plain, case.name), family_head(tmp_path / "head", plain)
    with engine(target, head, dtype="bfloat16", **TREES) as llm:
        found = generate(llm, PROMPTS, max_tokens=TOKENS)
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
        assert case.operator in operators(llm)
    assert len({tuple(answer) for answer in found}) > len(PROMPTS) * 0.8, "what is likely would prove little"
    with engine(target, dtype="bfloat16") as llm:
        check_tokens(llm, found)
        assert case.operator in operators(llm)


@MATRIX
def test_sampled_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPT-OSS in MXFP4: one distribution with and without trees, and a verifier with a fault is found out."""
    plain = family_target(tmp_path / "plain", "gpt_oss", **ALL_EXPERTS)
    target, head = quantise(tmp_path / "target", plain, "mxfp4"), family_head(tmp_path / "head", plain)
    settings, options = sampling_settings("gpt_oss"), {"dtype": "bfloat16", "max_num_seqs": 64}
    with engine(target, **options) as llm:
        sampled = draw(llm, settings, 500)
    with engine(target, head, **TREES, **options) as llm:
        check_distribution(llm, settings, sampled, monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=MATRIX)])
def test_latent_attention_by_the_kernels_of_other_cpus(dtype: str, tmp_path: Path) -> None:
    """With the flag that the plugin's reason names; vLLM's other layers run by AMX where they can."""
    target = family_target(tmp_path / "target", "deepseek_v3", **ALL_EXPERTS)
    head, options = family_head(tmp_path / "head", target), {"dtype": dtype, "attention_backend": "CPU_MLA"}
    with engine(target, head, **TREES, **options) as llm:
        found = generate(llm, PROMPTS, max_tokens=TOKENS)
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
    with engine(target, **options) as llm:
        if dtype == "float32":
            assert generate(llm, PROMPTS, max_tokens=TOKENS) == found
        check_tokens(llm, found)


def test_latent_attention_by_amx_is_left_to_vllm(tmp_path: Path) -> None:
    target = family_target(tmp_path / "target", "deepseek_v3")
    head = family_head(tmp_path / "head", target)
    for backend, served in ((None, False), ("CPU_MLA", True)):
        made = configure(target, head, dtype="bfloat16", attention_backend=backend)
        assert (made.parallel_config.worker_cls != unsupported.ENGINE_WORKERS["cpu"]) == served
