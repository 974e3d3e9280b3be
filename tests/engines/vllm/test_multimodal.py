"""Targets of multimodal classes in vLLM: prompts of text, and with pictures, get the text of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dflash_models import tiny_dflash
from family_models import KINDS as HEADS
from family_models import family_head, sampling_settings
from mtp_models import family_drafter
from multimodal_models import KINDS, PLACES, TEXT_ONLY, multimodal_target, picture
from PIL.Image import Image
from tiny_checkpoints import read_config, write_config
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm import LLM, SamplingParams
from vllm_bigram import draw
from vllm_configs import configure
from vllm_engines import engine, generate, random_shapes, rounds, runner
from vllm_requests import check_aborts, check_distribution, make_prompts

from eagle_plugin.core.shape import Levels
from eagle_plugin.vllm.unsupported import unsupported_reasons

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
TOKENS = 32
HYBRID = ("qwen3_5", "qwen3_5_moe")  # of which vLLM has no plain decoding in float32 on CPUs
MATRIX = pytest.mark.matrix


def limits(kind: str) -> dict[str, Any]:
    return {} if kind in PLACES else {"limit_mm_per_prompt": TEXT_ONLY}


class Asked(NamedTuple):
    prompt: str
    pictures: list[Image]


def questions(kind: str) -> list[Asked]:
    """Ten, of which most have one or two pictures."""
    found = []
    for i in range(10):
        pictures = [picture(i + 7 * k, (32 + 16 * (i % 3), 64)) for k in range((2 * i) % 3)]
        found.append(Asked(f"look {i} " + PLACES[kind] * len(pictures) + " and say" + " it" * i, pictures))
    return found


def look(llm: LLM, kind: str) -> list[list[int]]:
    """Greedy answers to these questions."""
    asked: list[Any] = [
        {"prompt": prompt} | ({"multi_modal_data": {"image": pictures}} if pictures else {})
        for prompt, pictures in questions(kind)
    ]
    settings = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(asked, settings, use_tqdm=False)]


@torch.inference_mode()
def look_in_transformers(target: Path, kind: str) -> list[list[int]]:
    """The same by transformers."""
    processor = AutoProcessor.from_pretrained(target)
    model = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0, "eos_token_id": None}
    found = []
    for prompt, pictures in questions(kind):
        read = processor(text=[prompt], images=pictures or None, return_tensors="pt")
        answer = model.generate(**read, do_sample=False, **length)
        found.append(answer[0, read["input_ids"].shape[1] :].tolist())
    return found


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("qwen3_vl", "eagle3"),
        pytest.param("qwen3_vl", "peagle", marks=MATRIX),
        pytest.param("mistral3", "eagle3", marks=MATRIX),
    ],
)
def test_pictures_in_prompts(kind: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps that are replayed, of trees of any shape, with prompts in parts and from the prefix cache."""
    target = multimodal_target(tmp_path / "target", kind)
    prompts = make_prompts(8)
    with engine(target) as llm:
        assert runner(llm).supports_mm_inputs
        expected, of_prompts = look(llm, kind), generate(llm, prompts)
    assert len({tuple(answer) for answer in expected}) == len(expected), "equality would prove little"
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    chunks = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    drafter = family_head(tmp_path / "head", target, head)
    with engine(target, drafter, policy="random", **TREES | chunks) as llm:
        step = runner(llm)._step
        for _ in range(2):  # then from the prefix cache
            before, replays = rounds(llm), step.functions.replays
            assert look(llm, kind) == expected
            count, tokens = rounds(llm, before)
            assert tokens / count > 1.2 and step.functions.replays > replays + 20
        assert generate(llm, prompts) == of_prompts


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("mistral3", marks=MATRIX)])
def test_text_alone_with_a_block_drafter(kind: str, tmp_path: Path) -> None:
    """Where the flags let no picture in."""
    target, prompts = multimodal_target(tmp_path / "target", kind), make_prompts(8)
    written = read_config(target)
    (tmp_path / "text").mkdir()
    write_config(tmp_path / "text", **written["text_config"])
    drafter = tiny_dflash(tmp_path / "drafter", tmp_path / "text")
    with engine(target, language_model_only=True) as llm:
        expected = generate(llm, prompts)
    with engine(target, drafter, language_model_only=True, **TREES) as llm:
        assert not runner(llm).supports_mm_inputs and runner(llm).drafter.levels.kind is Levels.PARALLEL
        assert generate(llm, prompts) == expected
        count, tokens = rounds(llm)
        assert count and tokens >= count


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("qwen3_5", "eagle3"),
        *(pytest.param("qwen3_5", head, marks=MATRIX) for head in ("peagle", "eagle2", "mtp")),
        *(pytest.param("qwen3_5_moe", head, marks=MATRIX) for head in ("eagle3", "mtp")),
    ],
)
def test_pictures_and_gated_delta_nets(kind: str, head: str, tmp_path: Path) -> None:
    """Qwen3.5: layers that keep a state, attention with a gate and positions of three axes."""
    target = multimodal_target(tmp_path / "target", kind)
    expected, drafter = look_in_transformers(target, kind), family_drafter(tmp_path / "head", target, head)
    assert len({tuple(answer) for answer in expected}) == len(expected), "equality would prove little"
    trees = TREES | {"topk": 8, "nodes": 32, "max_num_batched_tokens": 64}
    with engine(target, drafter, **trees, gpu_memory_utilization=0.3) as llm:
        assert look(llm, kind) == expected
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
        with random_shapes(llm):
            assert look(llm, kind) == expected


@MATRIX
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in HYBRID])
@pytest.mark.parametrize("head", HEADS)
def test_text_equals_plain_decoding(kind: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy text is equal, sampled text of one distribution; a verifier with a wrong temperature is found out."""
    target, prompts = multimodal_target(tmp_path / "target", kind), make_prompts(50)
    settings = sampling_settings(KINDS[kind][0])
    with engine(target, **limits(kind)) as llm:
        expected, sampled = generate(llm, prompts), draw(llm, settings, 500)
    drafter = family_head(tmp_path / "head", target, head)
    with engine(target, drafter, **TREES | limits(kind), max_num_batched_tokens=64) as llm:
        assert generate(llm, prompts) == expected
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
        with random_shapes(llm):
            assert generate(llm, prompts) == expected
            check_aborts(llm, prompts, expected)
            check_distribution(llm, settings, sampled, monkeypatch)


@pytest.mark.parametrize("only_text", [False, True])
def test_pictures_that_attend_in_both_directions(
    only_text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 of 26B and 31B: its own worker serves, or ours where only text is asked for."""
    target = multimodal_target(tmp_path / "target", "gemma4", use_bidirectional_attention="vision")
    drafter = family_head(tmp_path / "head", target)
    monkeypatch.setenv("EAGLE_PLUGIN", "0")  # which would choose the worker
    config = configure(target, drafter, limit_mm_per_prompt=TEXT_ONLY if only_text else {})
    found = unsupported_reasons(config)
    assert found == [] if only_text else "its images attend in both directions" in found[0]
