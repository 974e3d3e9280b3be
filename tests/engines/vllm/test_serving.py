"""The head of the examples in vLLM on a real model: by trees and by vLLM's own chain, the text of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm import _custom_ops
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm_engines import accept_length, engine, generate, rounds, runner
from vllm_greedy import write_heads, write_target

from eagle_plugin.kernels import bf16_linear, loader
from eagle_plugin.kernels.int8_linear import native_kernel
from eagle_plugin.models.store import get_model
from eagle_plugin.runtime.draft_weights import Int8Method
from eagle_plugin.runtime.target_weights import Bf16Method
from eagle_plugin.vllm.target_weights import use_bf16_kernel

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[3]
HEAD = ROOT / "examples/heads/smollm2-135m-instruct-eagle3"
QUESTIONS = [
    json.loads(line)["prompt"]
    for path in sorted((ROOT / "examples/prompts").glob("*.jsonl"))
    for line in path.read_text(encoding="utf-8").splitlines()
]
PROMPTS = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
LONG = {"max_model_len": 1024, "num_gpu_blocks_override": 256}


def test_greedy_text_equals_plain_decoding() -> None:
    target, prompts = get_model("smollm2-135m-instruct"), PROMPTS[::2]
    with engine(target, **LONG) as llm:
        plain = generate(llm, prompts, max_tokens=24)
    assert len({tuple(answer) for answer in plain}) > 10
    with engine(target, HEAD, depth=3, topk=3, nodes=8, **LONG) as llm:
        assert generate(llm, prompts, max_tokens=24) == plain
        trees = accept_length(llm)
    with engine(target, HEAD, nodes=4, chain=True, **LONG) as llm:
        assert generate(llm, prompts[:4], max_tokens=24) == plain[:4]
        chains = accept_length(llm)
    # Measured about 2.3 and 1.8 tokens per round (docs/performance.md); with misread drafts almost nothing is accepted.
    assert trees > 1.8
    assert chains > 1.4


@pytest.mark.skipif(native_kernel() is None, reason="this CPU has no AVX2")
@pytest.mark.matrix
@pytest.mark.parametrize("eager", [True, False])
def test_drafts_come_from_int8_weights_and_are_accepted(eager: bool) -> None:
    target = get_model("smollm2-135m-instruct")
    with engine(target, HEAD, depth=3, topk=3, nodes=8, dtype="bfloat16", enforce_eager=eager, **LONG) as llm:
        layers = [x for x in runner(llm).drafter.model.modules() if isinstance(x, LinearBase | ParallelLMHead)]
        assert len(layers) == 6 and all(isinstance(layer.quant_method, Int8Method) for layer in layers)
        if not eager and not layers[0].quant_method.in_graphs:
            pytest.skip("this CPU has AMX, with which a compiled head has bfloat16 weights")
        generate(llm, PROMPTS, max_tokens=32)
        assert accept_length(llm) > 1.8
        before = rounds(llm)
        for layer in layers:  # control: other weights in the same memory yield nothing
            layer.quant_method.packed.scales.neg_()
        generate(llm, PROMPTS[:8], max_tokens=32)
        count, tokens = rounds(llm, before)
        assert tokens / count < 1.3


@pytest.mark.skipif(native_kernel() is None, reason="this CPU has no AVX2")
def test_a_shared_output_layer_is_copied_for_the_head_alone(tmp_path: Path) -> None:
    target = write_target(tmp_path)
    with engine(target, write_heads(tmp_path, target)["eagle2"], dtype="bfloat16") as llm:
        ours, theirs = runner(llm).drafter.model.lm_head, runner(llm).get_model().lm_head
        assert ours.weight is theirs.weight
        assert isinstance(ours.quant_method, Int8Method) and not isinstance(theirs.quant_method, Int8Method)
        generate(llm, [[5, 9, 20, 33], [40, 7]], max_tokens=60)
        assert accept_length(llm) > 1.5


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_our_kernel_runs_a_target_whose_weights_vllm_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """As on a CPU with AVX2 alone, where oneDNN has no product of bfloat16 and vLLM takes torch's."""
    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    kernel = bf16_linear.Kernel(loader.function("bf16_linear_fma"), bf16_linear.ANY_ROWS)
    monkeypatch.setattr(bf16_linear, "native_kernel", lambda: kernel)
    rows, healthy = [], bf16_linear.multiply

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(len(x))
        return healthy(x, weight, bias)

    monkeypatch.setattr(bf16_linear, "multiply", counted)
    target = write_target(tmp_path)
    head = write_heads(tmp_path, target)["eagle2"]
    with engine(target, head, dtype="bfloat16", enforce_eager=eager) as llm:
        layers = [x for x in runner(llm).get_model().modules() if isinstance(x, LinearBase | ParallelLMHead)]
        assert len(layers) > 4 and all(isinstance(layer.quant_method, Bf16Method) for layer in layers)
        ours = runner(llm).drafter.model.lm_head  # the target's, which has a method of ours already
        assert native_kernel() is None or isinstance(ours.quant_method, Int8Method)
        rows.clear()
        generate(llm, [[5, 9, 20, 33], [40, 7]], max_tokens=60)
        assert accept_length(llm) > 1.5
        assert set(rows) & set(range(2, 65))


@pytest.mark.parametrize(("head_dtype", "served"), [(None, 2), (torch.bfloat16, 2), (torch.float32, 1)])
def test_an_output_layer_of_another_dtype_stays_vllms(
    monkeypatch: pytest.MonkeyPatch, head_dtype: torch.dtype | None, served: int
) -> None:
    model = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2))
    model[0].quant_method, model[1].quant_method = UnquantizedLinearMethod(), UnquantizedEmbeddingMethod()
    config = SimpleNamespace(head_dtype=head_dtype, dtype=torch.bfloat16)
    for rows, changed in ((bf16_linear.MAX_ROWS, 0), (bf16_linear.ANY_ROWS, served)):
        monkeypatch.setattr(bf16_linear, "native_kernel", lambda rows=rows: bf16_linear.Kernel(len, rows))
        assert use_bf16_kernel(model, config) == changed
