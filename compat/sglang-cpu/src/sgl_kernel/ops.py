"""torch.ops.sgl_kernel: the operations that SGLang's CPU attention backends and sampler look up by name."""

import functools
from typing import Any

import torch

from eagle_plugin.kernels import attention, kv
from sgl_kernel import mamba, qwen3_5
from sgl_kernel.murmur import murmur_hash32

SUPPORTED_DTYPES = (torch.bfloat16, torch.float32)


@functools.lru_cache(maxsize=256)
def _no_ancestors(b: int) -> torch.Tensor:
    """Ancestor bitmasks of a plain decode: the token counts as prefix, so there is no tail key to see."""
    return torch.zeros((b, 1), dtype=torch.int64)


def _float32(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.to(torch.float32)  # models keep them in their own dtype


def _nearest(sliding_window_size: int) -> dict[str, Any]:
    """Window and chunk of eagle-plugin's kernels; a number below 0 is not of SGLang but of eagle_sglang_cpu.llama4."""
    if sliding_window_size < 0:
        return {"chunk": -sliding_window_size}
    return {"window": sliding_window_size - 1}


def _refuse_unsupported(op, q, k_buffer, k_scale, v_scale, is_cross_attention, encoder_lens) -> None:
    if is_cross_attention or encoder_lens is not None:
        raise NotImplementedError(f"sgl_kernel.{op} got an encoder-decoder model, wanted a decoder: serve it on a GPU.")
    if k_scale != 1.0 or v_scale != 1.0:
        raise NotImplementedError(
            f"sgl_kernel.{op} got cache scales {k_scale} and {v_scale}, wanted 1.0: use --kv-cache-dtype auto."
        )
    if q.dtype != k_buffer.dtype or q.dtype not in SUPPORTED_DTYPES:
        raise NotImplementedError(
            f"sgl_kernel.{op} got {q.dtype} queries over a {k_buffer.dtype} cache, wanted both bfloat16 or both "
            f"float32: use --dtype bfloat16 or float32 and --kv-cache-dtype auto."
        )


def decode_attention_cpu(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Store one new key and value per request at `loc`, then attend from its query to all seq_lens[i] cached keys.

    query [b, Hq, D], buffers [slots, Hkv, D], key / value [b, Hkv, D] or None (already stored), loc i64 [b],
    req_to_token i32 [P, S], req_pool_indices and seq_lens i64 [b]; sliding_window_size counts the query itself, 0 = no
    window, -n = attention chunks of n tokens. `output` is written; attn_logits, scratch of the AMX kernel, is not used.
    """
    _refuse_unsupported("decode_attention_cpu", query, k_buffer, k_scale, v_scale, is_cross_attention, encoder_lens)
    if key is not None and value is not None:
        kv.store_kv(k_buffer, v_buffer, loc, key.contiguous(), value.contiguous())
    attention.tree_attention(
        query,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        seq_lens,
        _no_ancestors(query.shape[0]),
        tail=0,
        scale=sm_scale,
        logit_cap=logit_cap,
        **_nearest(sliding_window_size),
        sinks=_float32(sinks),
        out=output,
    )


def extend_attention_cpu(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Attend from the new tokens of each request to its cached prefix and to the new tokens before them.

    The keys and values of the new tokens are already in the cache; k_extend and v_extend are not read. q_extend and
    o_extend [T, Hq, D]; seq_lens [b] with the new tokens, extend_seq_lens and extend_start_loc [b]; tree_mask bool,
    flat: for each request e*e entries over its e new tokens (QLEN_ONLY). `o_extend` is written.
    """
    _refuse_unsupported("extend_attention_cpu", q_extend, k_buffer, k_scale, v_scale, is_cross_attention, encoder_lens)
    attention.extend_attention(
        q_extend,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_seq_lens.to(torch.int64),
        extend_start_loc.to(torch.int64),
        scale=sm_scale,
        causal=is_causal,
        mask=tree_mask,
        logit_cap=logit_cap,
        **_nearest(sliding_window_size),
        sinks=_float32(sinks),
        out=o_extend,
    )


_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_LIBRARY.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor(d!) attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attention, "
    "int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_LIBRARY.define(
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attention, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, "
    "bool is_causal) -> ()"
)
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_LIBRARY.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
_LIBRARY.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel=True, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor"
)
_LIBRARY.impl("fused_gdn_gating_cpu", mamba.fused_gdn_gating, "CPU")
_LIBRARY.impl("fused_sigmoid_gating_delta_rule_update_cpu", mamba.fused_sigmoid_gating_delta_rule_update, "CPU")
_LIBRARY.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_LIBRARY.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
qwen3_5.define(_LIBRARY)
