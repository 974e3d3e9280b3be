"""The config.json of a new head: a plain Llama layer that both engines can serve on the target."""

from __future__ import annotations

from typing import Any, Literal

from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.kinds import HeadSpec
from eagle_plugin.heads.other_layouts import SLIDING
from eagle_plugin.heads.target_files import TargetShape

Norms = Literal["3.0", "3.1", "before_fc", "before_fc_output"]
# The RoPE variants that transformers and both engines compute alike, and their keys.
ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}
MAX_HEAD_DIM = 128
NORM_KEYS: dict[Norms, dict[str, bool]] = {
    "3.0": {"fc_norm": False, "norm_before_fc": False, "norm_output": False},
    "3.1": {"fc_norm": True, "norm_before_fc": False, "norm_output": True},
    "before_fc": {"fc_norm": False, "norm_before_fc": True, "norm_output": False},
    "before_fc_output": {"fc_norm": False, "norm_before_fc": True, "norm_output": True},
}


def window_keys(window: int | None, layers: int) -> dict[str, Any]:
    """The keys of config.json that let each row of a head see the last `window` keys, its own among them."""
    return {} if window is None else {"layer_types": [SLIDING] * layers, "sliding_window": window}


def new_head_config(
    spec: HeadSpec,
    target: TargetShape,
    *,
    layers: int,
    intermediate_size: int | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
) -> dict[str, Any]:
    """The keys of a head's config.json that all kinds share; what is None follows from the target.

    A head has no biases, no q and k norms, no window of its target and full rotary positions: this is what both
    engines' classes for heads compute.

    Raises:
        HeadError: the sizes do not go together.
    """
    config = target.config
    if layers < 1:
        raise HeadError(f"a head has {layers} layers, wanted at least 1")
    heads, kv_heads, dim = _attention_shape(target)
    heads, kv_heads, dim = num_heads or heads, num_kv_heads or kv_heads, head_dim or dim
    if heads % kv_heads and num_kv_heads is None:
        kv_heads = heads
    if heads % kv_heads or dim % 2:
        raise HeadError(
            f"a head has {heads} attention heads over {kv_heads} key-value heads of size {dim}, wanted a multiple and "
            "an even size; choose other numbers of heads"
        )
    rope = read_rope(config)
    special = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
    return {
        "architectures": list(spec.architectures),
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": intermediate_size or _mlp_width(target),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }


def _attention_shape(target: TargetShape) -> tuple[int, int, int]:
    """(heads, key-value heads, head size): those of the target where it has ordinary attention."""
    config, hidden = target.config, target.hidden_size
    heads: int = config.get("num_attention_heads") or 0
    dim: int = config.get("head_dim") or (hidden // heads if heads else 0)
    if 0 < dim <= MAX_HEAD_DIM and "kv_lora_rank" not in config:
        return heads, config.get("num_key_value_heads") or heads, dim
    # Latent attention has no such sizes, and a draft head gains nothing from very wide attention heads.
    heads = max(hidden // MAX_HEAD_DIM, 1)
    return heads, next(n for n in (8, 4, 2, 1) if heads % n == 0), min(MAX_HEAD_DIM, hidden)


def _mlp_width(target: TargetShape) -> int:
    """The target's own width; where that is an expert's, 8/3 of the hidden size as in Llama, in steps of 256."""
    width = target.config.get("intermediate_size")
    if type(width) is int and width >= 2 * target.hidden_size:
        return width
    return -(-target.hidden_size * 8 // 3 // 256) * 256


def read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE of a head on a target with this config.json, as transformers' `rope_parameters`.

    Both spellings are read (rope_theta and rope_scaling, or rope_parameters). Variants that the engines compute in
    ways of their own, such as multimodal, partial or dynamic RoPE, become plain RoPE: a head learns with the
    positions that it is given.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope.get("full_attention"), dict):  # one entry per layer type
        rope = rope["full_attention"]
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    keys = ROPE_KEYS.get(kind, ())
    if rope.get("factor") is None or not keys:
        return {"rope_type": "default", "rope_theta": float(theta)}
    kept = {key: rope[key] for key in keys if rope.get(key) is not None}
    return {"rope_type": kind, "rope_theta": float(theta), **kept}
