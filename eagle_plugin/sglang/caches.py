"""Decides whether our worker reads the KV cache that an SGLang model will have."""

from __future__ import annotations

from typing import Any

from eagle_plugin.kernels.float8 import FLOAT8

# SGLang's names of caches of 8-bit floats, with one scale of a layer's keys and one of its values, and torch's.
NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def unsupported_cache_variables(device: str) -> list[str]:
    """Why our worker reads no KV cache that is made with these environment variables of the engine; empty else."""
    from sglang.srt.environ import envs

    reasons = []
    if envs.SGLANG_USE_HND_KVCACHE.get():
        reasons.append("SGLANG_USE_HND_KVCACHE: only KV caches in token-major layout are served")
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get() and device == "cuda":
        reasons.append("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: a KV cache that gets its memory after the captures")
    return reasons


def unsupported_cache(runner: Any, drafts: str | None = None) -> list[str]:
    """Why our worker does not read the KV cache that this loaded SGLang ``ModelRunner`` will make, or its head's.

    Asked before the cache is made. The flags about the cache are in `flag_support.unsupported_flags`; drafts: the value
    of --speculative-draft-kv-cache-dtype.
    """
    reasons = unsupported_cache_variables(runner.device)
    found, own = (str(dtype).removeprefix("torch.") for dtype in (runner.kv_cache_dtype, runner.dtype))
    if found != own and runner.kv_cache_dtype not in FLOAT8:
        reasons.append(
            f"KV cache of {found}: only KV caches in the model's own dtype, {own}, or 8-bit floats are served"
        )
    elif found != own and runner.device == "cpu":  # by the flag, or by a checkpoint whose quantisation asks for it
        reasons.append(f"KV cache of {found}: on a CPU only KV caches in the model's own dtype, {own}, are served")
    if drafts in ("bf16", "bfloat16") and own != "bfloat16":
        reasons.append(f"--speculative-draft-kv-cache-dtype {drafts}: the model's own dtype is {own}")
    return reasons


def cache_dtypes(runner: Any, arguments: Any) -> list[str]:
    """torch's names of the dtypes of the caches that this loaded target and its head will have, where it is known.

    A head's checkpoint may ask for one too, which nobody has read yet: its cache is refused by Triton then.
    """
    draft = arguments.speculative_draft_kv_cache_dtype or arguments.kv_cache_dtype
    return [str(runner.kv_cache_dtype).removeprefix("torch."), *filter(None, [NAMES.get(draft)])]
