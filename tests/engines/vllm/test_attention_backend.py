"""Where vLLM takes our attention backend, and what it then asks of it; test_attention.py has what it computes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from engine_signatures import assignments, calls, holds
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import attention as attention_layer
from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import registry

from eagle_plugin.vllm.attention import TreeMetadataBuilder
from eagle_plugin.vllm.backend import (
    FlashPromptsBackend,
    TreeAttentionBackend,
    TritonPromptsBackend,
    tree_attention,
)


def configuration(device_type: str) -> Any:
    """What `tree_attention` reads and sets of a ``VllmConfig``."""
    return types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type=device_type),
        attention_config=types.SimpleNamespace(backend="the user's", backend_per_kind={"full_attention": "another"}),
        speculative_config=types.SimpleNamespace(attention_backend=None),
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_platform_gives_our_backend_while_a_model_is_built(device_type: str) -> None:
    """A CPU has one backend, which ours replaces; on a GPU the configuration of both models asks for ours by name."""
    config, backends = configuration(device_type), registry.AttentionBackendEnum
    before = configuration(device_type)
    with tree_attention(config):
        if device_type == "cpu":
            assert config == before and backends.CPU_ATTN.get_class() is TreeAttentionBackend
        else:
            asked = config.attention_config.backend
            assert asked is config.speculative_config.attention_backend is backends.CUSTOM
            assert asked.get_class() is TreeAttentionBackend and not config.attention_config.backend_per_kind
    assert config == before and backends.CPU_ATTN.get_class() is not TreeAttentionBackend
    with pytest.raises(ValueError, match="CUSTOM"):
        backends.CUSTOM.get_class()


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        (None, FlashPromptsBackend),
        ("FLASH_ATTN", FlashPromptsBackend),
        ("TRITON_ATTN", TritonPromptsBackend),
        ("FLASHINFER", TreeAttentionBackend),
    ],
)
def test_the_users_backend_says_what_prompts_are_attended_to_with(named: str | None, wanted: type) -> None:
    config, backends = configuration("cuda"), registry.AttentionBackendEnum
    config.attention_config.backend = None if named is None else backends[named]
    with tree_attention(config):
        assert config.attention_config.backend.get_class() is wanted


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("has_sliding_window", [False, True])
def test_a_gpu_accepts_our_backend(has_sink: bool, has_sliding_window: bool) -> None:
    """vLLM asks a backend that was named in the configuration whether it serves the layer."""
    for head_size, wanted in ((128, []), (512, ["head_size not supported"])):
        asked = selector.AttentionSelectorConfig(
            head_size, torch.bfloat16, "auto", 16, has_sink=has_sink, has_sliding_window=has_sliding_window
        )
        capability = DeviceCapability(9, 0)
        found = TreeAttentionBackend.validate_configuration(device_capability=capability, **asked._asdict())
        assert found == wanted


def test_graphs_leave_attention_out() -> None:
    assert TreeMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER  # type: ignore[arg-type]


def test_layers_with_chunks_get_our_backend_unwrapped() -> None:
    """backend.py: vLLM's wrapper is called by its module's name, and only the layers know the chunk then."""
    module = chunked_local_attention
    wrap = module.create_chunked_local_attention_backend
    made = module.ChunkedLocalAttention.__init__
    assert calls(made, "create_chunked_local_attention_backend") == [
        "create_chunked_local_attention_backend(underlying_attn_backend, attention_chunk_size)"
    ]
    assert assignments(made, "self.attention_chunk_size") == ["attention_chunk_size"]
    assert wrap(TreeAttentionBackend, 64).get_builder_cls() is not TreeMetadataBuilder
    with tree_attention(configuration("cpu")):
        assert module.create_chunked_local_attention_backend(TreeAttentionBackend, 64) is TreeAttentionBackend
    assert module.create_chunked_local_attention_backend is wrap
    # Every block stays: with drafts all layers have the cache of full attention.
    assert holds(VllmConfig.__post_init__, "self.model_config.attention_chunk_size is not None")
    (forward,) = calls(attention_layer.unified_attention_with_output, "self.impl.forward")
    assert forward.startswith("self.impl.forward(self, query, key, value, ")
