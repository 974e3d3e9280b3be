"""Which attention backend vLLM gives the layers that it builds: ours, while a model of ours is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

from eagle_plugin.engines.vllm.attention import TreeAttentionBackend

BACKEND = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"


@contextmanager
def tree_attention() -> Iterator[None]:
    """Layers that are built inside attend by our backend, which replaces the platform's.

    Those with chunked attention get it as it is. vLLM would wrap its builder in one that makes a request of every
    chunk, and our rows describe whole requests; our layers know their chunks themselves.
    """
    enum = registry.AttentionBackendEnum.CPU_ATTN
    before = registry._ATTN_OVERRIDES.get(enum)
    registry.register_backend(enum, BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    wrap = chunked_local_attention.create_chunked_local_attention_backend
    chunked_local_attention.create_chunked_local_attention_backend = lambda backend, chunk: backend
    try:
        yield
    finally:
        chunked_local_attention.create_chunked_local_attention_backend = wrap
        registry._ATTN_OVERRIDES.pop(enum, None)
        if before is not None:
            registry._ATTN_OVERRIDES[enum] = before
        selector._cached_get_attn_backend.cache_clear()
