"""Engines whose caches hold 8-bit floats: text of draft trees is that of plain decoding with such a cache.

vLLM's own attention on a CPU has it with AVX-512 alone. So plain decoding is vLLM's, with a cache of the model's dtype
into which keys and values go rounded as an 8-bit cache keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import pytest
import torch
from gtest import p_values
from torch import Tensor
from trained_heads import rewrite
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm_bigram import OPTIONS, draw, write_models
from vllm_bigram import TREES as DRAWN_TREES
from vllm_engines import accept_length, engine, free_blocks, generate, random_shapes, runner, settle
from vllm_greedy import make_prompts, write_heads, write_target

from eagle_plugin.runtime import accept
from eagle_plugin.vllm import attention

MATRIX = pytest.mark.matrix
PROMPTS = make_prompts(20)
LENGTH = 32  # tokens of an answer
TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
Scales = tuple[float, float]  # of a layer's keys and values


def scales_of(layer: int) -> Scales:
    """Some that saturate and some that reach the subnormal numbers: what they are shows in the text."""
    return 0.001 * (layer + 1), 0.8 + layer / 3


def no_scales(layer: int) -> Scales:
    return 1.0, 1.0


@contextmanager
def rounding(dtype: torch.dtype, scales: Any) -> Iterator[None]:
    """vLLM's own attention on a CPU keeps what it would read of a cache of this dtype."""
    update, most = CPUAttentionBackendImpl.do_kv_cache_update, torch.finfo(dtype).max

    def rounded(x: Tensor, scale: float) -> Tensor:
        return ((x / scale).clamp(-most, most).to(dtype).float() * scale).to(x.dtype)

    def store(self: Any, layer: Any, key: Tensor, value: Tensor, *cache: Any) -> None:
        by = scales(extract_layer_index(layer.layer_name))
        update(self, layer, rounded(key, by[0]), rounded(value, by[1]), *cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", store)
        yield


def with_scales(target: Path, folder: Path) -> Path:
    """The target as a checkpoint whose cache has scales, and which asks for such a cache itself."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantised = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "ignore": []}
    quantised["kv_cache_scheme"] = scheme

    def add(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
        for layer in layers:
            for name, scale in zip("kv", scales_of(int(layer)), strict=True):
                weights[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor(scale)
        return weights

    return rewrite(target, folder, lambda c: c | {"quantization_config": quantised}, add)


class Models(NamedTuple):
    target: Path
    heads: dict[str, Path]
    exact: list[list[int]]  # answers to PROMPTS of plain decoding with a cache of the model's dtype
    expected: list[list[int]]  # with one of float8_e4m3fn
    scaled: list[list[int]]  # with that and scales


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("float8")
    target = write_target(folder)
    answers = []
    with engine(target) as llm:
        answers.append(generate(llm, PROMPTS, max_tokens=LENGTH))
        for scales in (no_scales, scales_of):
            with rounding(torch.float8_e4m3fn, scales):
                answers.append(generate(llm, PROMPTS, max_tokens=LENGTH))
    return Models(target, write_heads(folder, target), *answers)


def differing(found: list[list[int]], wanted: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(found, wanted, strict=True))


def test_rounding_changes_the_text(models: Models) -> None:
    """Else equality below would prove little."""
    assert differing(models.exact, models.expected) > 2
    assert differing(models.scaled, models.expected) > 5


@pytest.fixture(scope="module")
def trees(models: Models) -> Iterator[LLM]:
    options = {"kv_cache_dtype": "fp8", "enable_prefix_caching": True}
    with engine(models.target, models.heads["reduced"], **TREES, **options) as llm:
        yield llm


def test_greedy_text_is_that_of_plain_decoding(models: Models, trees: LLM) -> None:
    """The second time from the prefix cache; with other shapes the third time."""
    layers = runner(trees).compilation_config.static_forward_context
    assert {layer.kv_cache.dtype for layer in layers.values()} == {torch.uint8}  # the head's too
    for _ in range(2):
        assert generate(trees, PROMPTS, max_tokens=LENGTH) == models.expected
    assert accept_length(trees) > 1.8
    with random_shapes(trees) as shapes:
        assert generate(trees, PROMPTS, max_tokens=LENGTH) == models.expected
    assert len(shapes) > 6


def test_aborted_requests_leave_the_others_alone(models: Models, trees: LLM) -> None:
    served, found = trees.llm_engine, {}
    settle(trees)
    free = free_blocks(trees)
    settings = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(PROMPTS):
        served.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), settings)
    for step in range(1000):
        found |= {out.request_id: list(out.outputs[0].token_ids) for out in served.step() if out.finished}
        if step == 4:
            served.abort_request(["0", "3", "7", "19"])
        if not served.has_unfinished_requests():
            break
    wanted = {str(i): answer for i, answer in enumerate(models.expected) if i not in (0, 3, 7, 19)}
    assert found == wanted
    settle(trees)
    assert free_blocks(trees) == free


@pytest.fixture(scope="module")
def scaled(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine whose checkpoint has the scales and asks for the cache; the head's layers have none, which is 1."""
    target = with_scales(models.target, tmp_path_factory.mktemp("scales") / "target")
    with engine(target, models.heads["reduced"], **TREES) as llm:
        yield llm


def test_scales_of_a_checkpoint(models: Models, scaled: LLM) -> None:
    assert generate(scaled, PROMPTS, max_tokens=LENGTH) == models.scaled
    assert accept_length(scaled) > 1.8


@pytest.mark.parametrize("fault", ["ignored where they are written", "exchanged where they are read"])
def test_wrong_scales_show(models: Models, scaled: LLM, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls."""
    store = attention.store_kv

    def ignoring(*tensors: Tensor, **scales: Tensor) -> None:
        store(*tensors)

    def exchanging(kernel: Any) -> Any:
        return lambda *tensors, k_scale, v_scale, **options: kernel(
            *tensors, k_scale=v_scale, v_scale=k_scale, **options
        )

    if fault == "ignored where they are written":
        monkeypatch.setattr(attention, "store_kv", ignoring)
    else:
        for name in ("tree_attention", "extend_attention"):
            monkeypatch.setattr(attention, name, exchanging(getattr(attention, name)))
    assert differing(generate(scaled, PROMPTS, max_tokens=LENGTH), models.scaled) > 10


@MATRIX
@pytest.mark.parametrize("head", ["eagle2", "peagle"])
def test_other_heads(models: Models, head: str) -> None:
    with engine(models.target, models.heads[head], **TREES, kv_cache_dtype="fp8_e4m3", policy="random") as llm:
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == models.expected
        assert accept_length(llm) > 1.2


@MATRIX
def test_five_bits_of_exponent(models: Models) -> None:
    with engine(models.target) as llm, rounding(torch.float8_e5m2, no_scales):
        expected = generate(llm, PROMPTS, max_tokens=LENGTH)
    assert differing(expected, models.expected) > 2
    with engine(models.target, models.heads["reduced"], **TREES, kv_cache_dtype="fp8_e5m2") as llm:
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == expected


@MATRIX
def test_captured_steps(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, emulated; costs are measured, and the round is tested before it serves."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    monkeypatch.setenv("EAGLE_SELFTEST", "1")
    options = {"kv_cache_dtype": "fp8", "policy": "auto", "max_num_seqs": 4}
    with engine(models.target, models.heads["reduced"], **TREES, **options) as llm:
        assert generate(llm, PROMPTS[:8], max_tokens=LENGTH) == models.expected[:8]
        assert runner(llm)._step.functions.replays > 20


@MATRIX
def test_sampled_text_has_the_distribution_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control of a verifier that accepts every draft."""
    target, head = write_models(tmp_path)
    settings: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.85}]
    with engine(target, **OPTIONS) as plain, rounding(torch.float8_e4m3fn, no_scales):
        expected = draw(plain, settings, 1600)
    with engine(target, head, policy="random", kv_cache_dtype="fp8", **DRAWN_TREES, **OPTIONS) as llm:
        for ours, theirs in zip(draw(llm, settings, 800), expected, strict=True):
            assert min(p_values(ours, theirs).values()) > 1e-5
        monkeypatch.setattr(accept, "verify_tree", broken_verifier.FAULTS["every draft accepted"])
        assert min(p_values(draw(llm, settings[:1], 800)[0], expected[0]).values()) < 1e-10
