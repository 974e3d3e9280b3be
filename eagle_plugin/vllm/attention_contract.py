"""Lists the names of vLLM's attention that the adapter replaces, calls or reads, with their parameters."""

from __future__ import annotations

from eagle_plugin.runtime.engine_contract import Contract, attributes

ATTENTION_CONTRACT: Contract = {
    "vllm.model_executor.layers.attention.attention": {
        "unified_attention_with_output": "query key value output layer_name ...",
        "set_default_quant_scales": "layer register_buffer",
    },
    "vllm.config": {"get_current_vllm_config_or_none": ""},
    "vllm.v1.kv_cache_interface.KVQuantMode": attributes("NONE FP8_PER_TENSOR"),
    "vllm.v1.attention.backend.AttentionBackend": {
        "get_name": "",
        "get_impl_cls": "",
        "get_builder_cls": "",
        "supported_kv_cache_layouts": "cls",
        "get_supported_head_sizes": "cls",
        "supports_sliding_window": "cls",
        "supports_non_causal": "cls",
        "supports_sink": "cls",
    },
    "vllm.v1.attention.backend.AttentionImpl": {
        "__init__": "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype"
        " logits_soft_cap attn_type kv_sharing_target_layer_name",
        "forward": "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        "process_weights_after_loading": "self act_dtype",
    },
    "vllm.v1.attention.backend.AttentionMetadataBuilder": {
        "__init__": "self kv_cache_spec layer_names vllm_config device",
        "build": "self common_prefix_len common_attn_metadata fast_build",
    },
    "vllm.v1.attention.backend.CommonAttentionMetadata": attributes(
        "query_start_loc query_start_loc_cpu seq_lens max_seq_len block_table_tensor slot_mapping"
    ),
    "vllm.v1.attention.backends.fa_utils": {"get_flash_attn_version": "requires_alibi head_size ..."},
    "vllm.vllm_flash_attn.flash_attn_interface": {
        "flash_attn_varlen_func": "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p"
        " softmax_scale causal window_size softcap ...",
    },
    "vllm.v1.attention.ops.triton_unified_attention": {
        "unified_attention": "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal"
        " window_size block_table softcap q_descale k_descale v_descale ...",
    },
    "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend": attributes("get_name get_impl_cls get_builder_cls"),
    "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl": {
        "forward_mqa": "self q kv_c_and_k_pe_cache attn_metadata layer",
        "do_kv_cache_update": "self kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale ...",
        **attributes("scale kv_lora_rank"),
    },
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention": {
        "forward_impl": "self q k_c_normed k_pe kv_cache attn_metadata output ...",
        "bind_kv_cache": "self kv_cache",
    },
    "vllm.v1.attention.backends.registry": {"register_backend": "backend class_path ...", "_ATTN_OVERRIDES": ""},
    "vllm.v1.attention.backends.gdn_attn.GDNAttentionBackend": {"get_builder_cls": ""},
}
