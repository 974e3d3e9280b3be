"""Decides whether our worker reads the KV cache that an SGLang model will have."""

from __future__ import annotations

from typing import Any


def unsupported_cache(runner: Any) -> list[str]:
    """Why our worker does not read the KV cache that this loaded SGLang ``ModelRunner`` will make; empty when it does.

    Asked before the cache is made. The flags about the cache are in `support.unsupported_flags`.
    """
    from sglang.srt.environ import envs

    reasons = []
    if envs.SGLANG_USE_HND_KVCACHE.get():
        reasons.append("SGLANG_USE_HND_KVCACHE: only KV caches in token-major layout are served")
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get() and runner.device == "cuda":
        reasons.append("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: a KV cache that gets its memory after the captures")
    if runner.kv_cache_dtype != runner.dtype:  # by a checkpoint whose quantisation asks for it
        found, wanted = (str(dtype).removeprefix("torch.") for dtype in (runner.kv_cache_dtype, runner.dtype))
        reasons.append(f"KV cache of {found}: only KV caches in the model's own dtype, {wanted}, are served")
    return reasons
