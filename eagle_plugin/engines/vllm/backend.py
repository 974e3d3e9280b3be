"""Which attention backend vLLM gives the layers that it builds: ours, while a model of ours is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

from eagle_plugin.engines.vllm.attention import TreeAttentionBackend

BACKEND = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"


@contextmanager
def tree_attention() -> Iterator[None]:
    """Layers that are built inside attend by our backend, which replaces the platform's."""
    enum = registry.AttentionBackendEnum.CPU_ATTN
    before = registry._ATTN_OVERRIDES.get(enum)
    registry.register_backend(enum, BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        registry._ATTN_OVERRIDES.pop(enum, None)
        if before is not None:
            registry._ATTN_OVERRIDES[enum] = before
        selector._cached_get_attn_backend.cache_clear()
