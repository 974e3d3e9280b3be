"""Our attention backend as vLLM knows it, and how the layers of a model of ours get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import registry
from vllm.v1.kv_cache_interface import KVCacheLayout

from eagle_plugin.vllm.attention import TreeAttentionImpl, TreeMetadataBuilder
from eagle_plugin.vllm.cache_dtypes import FLOAT8
from eagle_plugin.vllm.latent_attention import LatentAttentionBackend
from eagle_plugin.vllm.prompt_attention import FlashPromptsImpl, TritonPromptsImpl


class TreeAttentionBackend(AttentionBackend):
    """Has the name that vLLM keeps for backends of others: connectors of KV caches refuse a server with another one.

    On a CPU it is registered over CPU_ATTN, the only backend that vLLM gives the layers there, on a GPU over CUSTOM,
    which a configuration can ask for. Our metadata declares no support of CUDA graphs, so that vLLM leaves attention
    out of them.
    """

    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "bfloat16", "float16", *FLOAT8]

    @staticmethod
    def get_name() -> str:
        """Of `AttentionBackendEnum`, where vLLM looks it up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """The layers' class."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        """The metadata's builder."""
        return TreeMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layer by layer, block by block, token by token."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Those of the native kernels."""
        return list(range(16, 257, 16))

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are a parameter of the kernels."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Which rows see each other is a parameter of the kernels."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are a parameter of the kernels."""
        return True


class FlashPromptsBackend(TreeAttentionBackend):
    """The same with FlashAttention for prompts."""

    @staticmethod
    def get_impl_cls() -> type[FlashPromptsImpl]:
        """The layers' class."""
        return FlashPromptsImpl


class TritonPromptsBackend(TreeAttentionBackend):
    """The same with vLLM's own Triton kernel for prompts."""

    @staticmethod
    def get_impl_cls() -> type[TritonPromptsImpl]:
        """The layers' class."""
        return TritonPromptsImpl


@contextmanager
def tree_attention(vllm_config: Any) -> Iterator[None]:
    """Layers that are built inside attend by our backend, whatever backend this ``VllmConfig`` names; that one says on
    a GPU only what prompts are attended to with.

    Those with chunked attention get it as it is. vLLM would wrap its builder in one that makes a request of every
    chunk, and our rows describe whole requests; our layers know their chunks themselves.
    """
    on_cpu = vllm_config.device_config.device_type == "cpu"
    backend = TreeAttentionBackend if on_cpu else _of_a_gpu(vllm_config)
    ours: list[type[AttentionBackend]] = [backend, *([LatentAttentionBackend] if on_cpu else [])]
    names = ["CPU_ATTN" if on_cpu and of is backend else of.get_name() for of in ours]
    enums = [registry.AttentionBackendEnum[name] for name in names]
    before = [registry._ATTN_OVERRIDES.get(enum) for enum in enums]
    for enum, of in zip(enums, ours, strict=True):
        registry.register_backend(enum, f"{of.__module__}.{of.__qualname__}")
    selector._cached_get_attn_backend.cache_clear()
    wrap = chunked_local_attention.create_chunked_local_attention_backend
    chunked_local_attention.create_chunked_local_attention_backend = lambda backend, chunk: backend
    try:
        if on_cpu:
            yield
        else:
            with _asking_for(enums[0], vllm_config):
                yield
    finally:
        chunked_local_attention.create_chunked_local_attention_backend = wrap
        for enum, path in zip(enums, before, strict=True):
            registry._ATTN_OVERRIDES.pop(enum, None)
            if path is not None:
                registry._ATTN_OVERRIDES[enum] = path
        selector._cached_get_attn_backend.cache_clear()


def forget_caches(vllm_config: Any) -> None:
    """Let the layers hold no cache that the engine measures its own graphs with: it gives the memory to others."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(impl := getattr(layer, "impl", None), TreeAttentionImpl):
            impl.forget_cache()


def _of_a_gpu(vllm_config: Any) -> type[TreeAttentionBackend]:
    """With the kernel for prompts of the backend that the user named; with FlashAttention where vLLM's kernel reads no
    caches of ours, and with none for CUSTOM, which is ours."""
    named, enum = vllm_config.attention_config.backend, registry.AttentionBackendEnum
    of_names = {enum.TRITON_ATTN: TritonPromptsBackend, enum.CUSTOM: TreeAttentionBackend}
    return of_names.get(named, FlashPromptsBackend)


@contextmanager
def _asking_for(enum: Any, vllm_config: Any) -> Iterator[None]:
    """The configuration asks for this backend, for both models and all kinds of layers."""
    attention, speculative = vllm_config.attention_config, vllm_config.speculative_config
    before = attention.backend, attention.backend_per_kind, speculative.attention_backend
    attention.backend, attention.backend_per_kind, speculative.attention_backend = enum, {}, enum
    try:
        yield
    finally:
        attention.backend, attention.backend_per_kind, speculative.attention_backend = before
