"""The caps of a server whose user gave none (sglang/preflight.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from head_edits import Edit, config, with_mask
from sglang_flags import SERVED

from eagle_plugin.kernels import build
from eagle_plugin.policy.shapes import GPU_SHAPE, shape_for

CHAIN = (3, 1, 4)
Chooser = Callable[..., tuple[int, int, int]]


@pytest.fixture
def head(tiny_eagle3: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_eagle3, tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, head: Path) -> Chooser:
    """The caps in place of `engines`, on a GPU of capability `gpu`, with a target of this attention."""
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs.model_config import AttentionArch

    from eagle_plugin.sglang.preflight import auto_parameters

    def choose(
        engines: tuple[int, int, int] = (5, 4, 8),
        gpu: tuple[int, int] | None = (9, 0),
        nvcc: str | None = "nvcc",
        attention: str = "MHA",
        has_states: bool = False,
        head_dim: int = 128,
        target: str = "LlamaForCausalLM",
        **flags: object,
    ) -> tuple[int, int, int]:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[target]),
            attention_arch=AttentionArch[attention],
            is_encoder_decoder=False,
            head_dim=head_dim,
        )
        monkeypatch.setattr(model_override_base, "resolved_view", lambda arguments: arguments)
        monkeypatch.setattr(model_override_base, "model_config_of", lambda _: config)
        monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: object() if has_states else None)
        monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
        sizes = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        backends = (
            *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
            "speculative_draft_attention_backend",
        )
        given = {"model_path": "target", "speculative_draft_model_path": str(head), "page_size": 1}
        given |= {"enable_multi_layer_eagle": False, "lora_backend": "csgmv"}
        return auto_parameters(SimpleNamespace(**SERVED | dict.fromkeys((*sizes, *backends)) | given | flags), engines)

    return choose


def test_on_a_cpu_they_are_ours(chosen: Chooser) -> None:
    assert chosen() == chosen(CHAIN) == (2, 4, 8)
    assert chosen(speculative_algorithm="NGRAM") == (5, 4, 8)


def test_on_a_gpu_the_chain_of_the_engine_becomes_a_tree(chosen: Chooser) -> None:
    assert shape_for(7, on_gpu=True) == GPU_SHAPE == (7, 2, 8)
    assert chosen(CHAIN, device="cuda") == GPU_SHAPE
    assert chosen(CHAIN, device="cuda", attention_backend="fa3", page_size=None) == GPU_SHAPE
    assert chosen(CHAIN, device="cuda", kv_cache_dtype="fp8_e4m3", enable_lora=True) == GPU_SHAPE
    assert chosen(device="cuda") == (5, 4, 8)  # its trees stay


@pytest.mark.parametrize(
    "otherwise",
    [
        {"gpu": None},
        {"gpu": (7, 5)},
        {"nvcc": None},
        {"attention": "MLA"},
        {"has_states": True},
        {"page_size": 64},
        {"attention_backend": "trtllm_mha"},
        {"decode_attention_backend": "flashmla"},
        {"speculative_draft_attention_backend": "trtllm_mha"},
        {"speculative_draft_model_path": "target/../target/"},
        {"speculative_draft_model_path": "hub/name", "speculative_algorithm": "EAGLE"},
        {"enable_multi_layer_eagle": True},
        {"speculative_draft_model_path": None},
        {"speculative_use_rejection_sampling": True},
        {"enable_unified_memory": True},
        {"enable_mixed_chunk": True},
        {"kt_weight_path": "experts"},
        {"head_dim": 512},
        {"gpu": (8, 6), "kv_cache_dtype": "fp8_e4m3"},
        {"gpu": (8, 6), "speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {"lora_paths": ["adapter"], "lora_backend": "triton"},
        {"enable_lora": True, "lora_backend": "triton"},
    ],
    ids=lambda flags: " ".join(flags),
)
def test_it_stays_where_the_engines_own_worker_will_serve(chosen: Chooser, otherwise: dict[str, object]) -> None:
    """Some of these flags end the engine's start with a tree."""
    assert chosen(CHAIN, device="cuda", **otherwise) == CHAIN


@pytest.mark.parametrize("path", [None, "target"])
def test_an_mtp_layer_of_the_target_gets_trees_where_it_is_served(chosen: Chooser, path: str | None) -> None:
    own = {"speculative_draft_model_path": path, "speculative_algorithm": "EAGLE", "device": "cuda"}
    assert chosen(CHAIN, target="MiMoForCausalLM", **own) == GPU_SHAPE
    assert chosen(CHAIN, target="Step3p5ForCausalLM", **own) == CHAIN
    assert chosen(CHAIN, target="Qwen3NextForCausalLM", has_states=True, **own) == CHAIN
    assert chosen(CHAIN, target="MiMoForCausalLM", **own | {"speculative_algorithm": "EAGLE3"}) == CHAIN


@pytest.mark.parametrize("name", ["SGLANG_USE_HND_KVCACHE", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_it_stays_with_caches_that_our_worker_does_not_read(
    chosen: Chooser, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert chosen(CHAIN, device="cuda") == CHAIN


@pytest.mark.parametrize(
    "edit",
    [
        config(architectures=["Qwen3NextForCausalLMMTP"]),
        config(architectures=["Eagle3DeepseekV2ForCausalLM"]),
    ],
    ids=["MTP", "latent attention"],
)
def test_it_stays_with_a_head_that_is_left_to_the_engine(chosen: Chooser, head: Path, edit: Edit) -> None:
    edit(head)
    assert chosen(CHAIN, device="cuda") == CHAIN


def test_weights_that_are_a_pickle_are_a_heads_too(chosen: Chooser, head: Path) -> None:
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    assert chosen(CHAIN, device="cuda") == GPU_SHAPE


def test_a_name_on_a_model_hub_is_that_of_a_head(chosen: Chooser) -> None:
    assert chosen(CHAIN, device="cuda", speculative_draft_model_path="hub/name") == GPU_SHAPE


def test_a_parallel_head_gets_deep_trees(chosen: Chooser, head: Path) -> None:
    """As many levels as its record names, else 7; not where the engine's own worker serves."""
    with_mask(head)
    assert chosen() == (7, 4, 8) and chosen(device="cuda") == (7, 4, 8) and chosen(CHAIN, device="cuda") == GPU_SHAPE
    assert chosen(CHAIN, page_size=16) == (7, 1, 8)
    assert chosen(enable_mixed_chunk=True) == (2, 4, 8)
    training = {"recipe": {"phases": [{"steps": 3}]}}
    record = {"format": 1, "kind": "peagle", "aux_layers": [2, 3, 4], "target": {}, "training": training}
    (head / "eagle_plugin.json").write_text(json.dumps(record))
    assert chosen() == (3, 4, 8) and chosen(device="cuda") == (3, 4, 8) and chosen(CHAIN, device="cuda") == (3, 2, 8)
    (head / "config.json").write_text("{")  # refused by the next check
    assert chosen() == (2, 4, 8)
