"""Qwen3-Next in vLLM: text and distribution of transformers' decoding, since vLLM's own is bfloat16 only on CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_signatures import assigned, fields, parameters, returned
from family_models import family_head, family_target
from mtp_models import family_drafter
from tiny_checkpoints import read_config
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM
from vllm.config import CacheConfig, CompilationConfig, CompilationMode
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_bigram import PROMPT
from vllm_configs import configure
from vllm_engines import core, counters, engine, fixed_shapes, generate, random_shapes, rounds, runner
from vllm_requests import check_aborts, check_distribution, make_prompts

from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm import linear_attention, support, unsupported
from eagle_plugin.vllm.attention import ExtendRows, Rows
from eagle_plugin.vllm.linear_attention import LinearLayers, LinearMetadata
from eagle_plugin.vllm.round_test import RoundTest

FAMILY, TOKENS = "qwen3_next", 48
SETTINGS = [{"temperature": 1.0}, {"temperature": 0.5}]
TREES: dict[str, Any] = {"depth": 3, "topk": 8, "nodes": 32, "max_num_batched_tokens": 64}


class Reference:
    """What transformers' model says."""

    def __init__(self, target: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        return self._run(prompt, tokens, do_sample=False)[0].tolist()

    def draw(self, settings: list[dict[str, Any]], count: int) -> list[np.ndarray]:
        prompt = self._tokenizer(PROMPT).input_ids
        sampled = {"do_sample": True, "num_return_sequences": count, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(0)
        return [self._run(prompt, 4, **sampled, **setting).numpy() for setting in settings]

    def _run(self, prompt: list[int], tokens: int, **options: Any) -> torch.Tensor:
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            found = self._model.generate(ids, attention_mask=torch.ones_like(ids), **length, **options)
        return found[:, len(prompt) :]


class Served(NamedTuple):
    target: Path
    head: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    reference: Reference


def made(folder: Path, kind: str) -> Served:
    target = family_target(folder / "target", FAMILY)
    head, reference = family_drafter(folder / "head", target, kind), Reference(target)
    prompts = make_prompts(10)
    expected = [reference.generate(prompt, TOKENS) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) > len(prompts) * 0.8, "equality would prove little"
    return Served(target, head, prompts, expected, reference)


@pytest.fixture(
    scope="module",
    params=["eagle3", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("peagle", "eagle2", "mtp"))],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return made(tmp_path_factory.mktemp("qwen3-next"), request.param)


@pytest.mark.matrix
def test_text_and_distribution(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, trees of every shape and plain rounds, aborts, sampling; vLLM's defaults but for their size."""
    with engine(served.target, served.head, **TREES, enable_prefix_caching=None) as llm:
        before = rounds(llm)
        assert generate(llm, served.prompts, max_tokens=TOKENS) == served.expected
        count, tokens = rounds(llm, before)
        assert tokens / count > 1.2
        with random_shapes(llm):
            assert generate(llm, served.prompts, max_tokens=TOKENS) == served.expected
            check_aborts(llm, served.prompts, served.expected)
            check_distribution(llm, SETTINGS, served.reference.draw(SETTINGS, 500), monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"plugin": {"async_scheduling": True}, "policy": "random"}, marks=pytest.mark.matrix, id="async"),
        pytest.param({"num_gpu_blocks_override": 12}, id="preempted"),
    ],
)
def test_text_under_other_flags(options: dict[str, Any], served: Served) -> None:
    with engine(served.target, served.head, **TREES, gpu_memory_utilization=0.3, **options) as llm:
        assert generate(llm, served.prompts, max_tokens=TOKENS) == served.expected
        if "num_gpu_blocks_override" in options:
            assert counters(llm)["vllm:num_preemptions"] > 0


def test_deep_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that says three tokens, and trees of all three: many paths are as deep as the tree."""
    target = family_target(tmp_path / "target", FAMILY, says=3)
    head, reference = family_head(tmp_path / "head", target, "eagle3", 3), Reference(target)
    prompts = make_prompts(8)
    with engine(target, head, depth=3, topk=3, nodes=40) as llm, fixed_shapes(llm):
        before = rounds(llm)
        expected = [reference.generate(prompt, TOKENS) for prompt in prompts]
        assert generate(llm, prompts, max_tokens=TOKENS) == expected
        count, tokens = rounds(llm, before)
        assert tokens / count > 2.3
        # Of each request one state is kept; vLLM's own speculation keeps one more for each drafted token.
        specs = [group.kv_cache_spec for group in core(llm).scheduler.kv_cache_config.kv_cache_groups]
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        assert states and all(spec.num_speculative_blocks == 0 for spec in states)
        # The self-test of a server, which a state that is not added to would fail.
        assert RoundTest(runner(llm)).run() == []
        monkeypatch.setattr(LinearLayers, "commit", lambda *_: None)
        assert RoundTest(runner(llm)).run()[-1].startswith("a token after an accepted path: the logits of ")


@contextmanager
def captured(monkeypatch: pytest.MonkeyPatch, served: Served) -> Iterator[LLM]:
    """An engine whose decode steps are replayed by the graph emulator."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    options: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
    with recording_launches(), engine(served.target, served.head, **options) as llm:
        yield llm


@pytest.mark.matrix  # it takes a minute; test_fake_cuda_captured.py and test_deep_paths are in every run
def test_text_by_replays(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are verified and walked by what was captured, or by one of both alone."""
    with captured(monkeypatch, served) as llm:
        step = runner(llm)._step
        replays, run = Counter[str](), step.functions.run
        step.functions.run = lambda key, f: (replays.update([key[0]] * (key in step.functions)), run(key, f))[1]
        assert generate(llm, served.prompts, max_tokens=TOKENS) == served.expected
        assert replays["verify"] == replays["walk"] > 20
        assert RoundTest(runner(llm)).run() == []
        for missing in ("can_verify", "can_walk"):
            with monkeypatch.context() as patch:
                patch.setattr(step, missing, lambda *_: False)
                assert generate(llm, served.prompts, max_tokens=TOKENS) == served.expected
        # The controls: a walk that keeps no state, in the comparison with the eager function and in the text.
        with monkeypatch.context() as patch:
            patch.setattr(step._linear, "commit", lambda *_: None)
            assert any("states of linear layers" in reason for reason in RoundTest(runner(llm)).run())
        with monkeypatch.context() as patch:
            patch.setattr(step._linear, "begin", lambda *_: None)  # all states in the slots of an earlier step
            assert generate(llm, served.prompts, max_tokens=TOKENS) != served.expected


def method_of(head: Path) -> str:
    if "Qwen" in read_config(head)["architectures"][0]:
        return "mtp"
    return "eagle3" if "Eagle3" in read_config(head)["architectures"][0] else "eagle"


def test_prefix_caching_is_switched_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(support, "_log_once", lambda _level, line: lines.append(line))
    config = configure(served.target, served.head, method=method_of(served.head), enable_prefix_caching=True)
    assert (config.cache_config.enable_prefix_caching, config.cache_config.mamba_cache_mode) == (False, "none")
    assert any("prefix caching is off" in line for line in lines)


def test_what_is_not_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    config = configure(served.target, served.head, method=method_of(served.head))
    assert unsupported.unsupported_reasons(config) == []
    config.cache_config.use_replayssm = True
    assert [reason.split(":")[0] for reason in unsupported.unsupported_reasons(config)] == ["--use-replayssm"]


def test_graphs_of_vllm_end_before_our_operator() -> None:
    """As before vLLM's own; in the lists that it makes, and in one that a user gives."""
    given = ["vllm::unified_attention_with_output"]
    for operators in (None, given):
        config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, splitting_ops=operators)
        support._split_at_our_operator(config)
        config.set_splitting_ops_for_v1("naive")
        assert support.LINEAR_OPERATOR in config.splitting_ops
        assert config.splitting_ops_contain_attention() is (operators is None)
    namespace, name = support.LINEAR_OPERATOR.split("::")
    assert getattr(getattr(torch.ops, namespace), name).default._schema.name == support.LINEAR_OPERATOR
    assert support.LINEAR_OPERATOR not in CompilationConfig()._attention_ops


def test_a_reloaded_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some CPUs have its weight packed; vLLM keeps it unpacked beside that, anew after every load."""
    keys, values, dim, taps, n = 2, 4, 16, 4, 5
    channels = (2 * keys + values) * dim
    old, new = torch.randn(2, channels, taps)
    rows, gates = torch.randn(n, channels), torch.randn(n, values)
    extend = ExtendRows(torch.tensor([0]), torch.tensor([n]), torch.tensor([n]), torch.tensor([0]))

    def output(layer: Any) -> torch.Tensor:
        metadata = LinearMetadata(Rows(extend, None, extend_lens=[n]), torch.tensor([1]))
        context = SimpleNamespace(attn_metadata={"one": metadata}, no_compile_layers={"one": layer})
        monkeypatch.setattr(linear_attention, "get_forward_context", lambda: context)
        layer.kv_cache = torch.zeros(2, taps - 1, channels), torch.zeros(2, values, dim, dim)
        out = torch.zeros(n, values, dim)
        linear_attention.gated_delta_trees(rows, gates, gates, out, "one")
        return out

    def made(weight: torch.Tensor) -> Any:
        conv1d = SimpleNamespace(weight=weight[:, None], bias=None, _cpu_unpacked_conv_weight=weight)
        sizes = {"num_k_heads": keys, "num_v_heads": values, "tp_size": 1, "head_k_dim": dim, "head_v_dim": dim}
        others = {"A_log": torch.zeros(values), "dt_bias": torch.zeros(values), "conv_kernel_size": taps}
        layer = SimpleNamespace(prefix="one", conv1d=conv1d, get_kv_cache_spec=None, **sizes, **others)
        linear_attention._serve(layer)
        return layer

    served, wanted = made(old), output(made(new))
    assert not torch.equal(output(served), wanted)
    served.conv1d._cpu_unpacked_conv_weight = new
    assert torch.equal(output(served), wanted)


def test_contract() -> None:
    """What `linear_attention.py` touches of vLLM's layer."""
    layer = QwenGatedDeltaNetAttention
    assert parameters(layer.fix_query_key_value_ordering) == ["self", "mixed_qkvz", "mixed_ba"]
    assert parameters(layer.split_ba) == ["self", "ba"]
    assert parameters(layer._output_projection) == ["self", "core_attn_out", "z"]
    assert parameters(layer.get_kv_cache_spec) == ["self", "vllm_config"]
    assert parameters(layer.get_attn_backend) == ["self"]
    assert returned(layer.forward) == ["self._forward_method(hidden_states)"]
    assert "self.num_spec" in returned(layer.get_state_shape)[0]
    own = {"num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv1d", "conv_kernel_size", "A_log", "dt_bias"}
    assert own | {"gqa_interleaved_layout", "value_dim"} <= assigned(layer.__init__)
    assert {"prefix", "tp_size", "num_spec", "model_config"} <= assigned(GatedDeltaNetAttention.__init__)
    assert {"num_speculative_blocks", "block_size"} <= fields(MambaSpec)
    assert {"enable_prefix_caching", "mamba_cache_mode", "mamba_block_size", "use_replayssm"} <= fields(CacheConfig)


@pytest.mark.matrix
def test_text_of_a_compiled_engine(tmp_path: Path) -> None:
    """The last test: what vLLM compiles in a later engine of the same process fails in torch's tracer."""
    target, head, prompts, expected, _ = made(tmp_path, "eagle3")
    with engine(target, head, **TREES, gpu_memory_utilization=0.3, enforce_eager=False) as llm:
        assert generate(llm, prompts, max_tokens=TOKENS) == expected
