"""Lists the names of SGLang that the adapter replaces, calls or reads, with their parameters.

Names that the adapter imports or hooks into are found by themselves; here is what it touches of them.
"""

from __future__ import annotations

from eagle_plugin.runtime.engine_contract import Contract, attributes

CONTRACT: Contract = {
    # Hooks of plugin.py.
    "sglang.srt.plugins.hook_registry.HookRegistry": {"register": "cls target hook hook_type ..."},
    "sglang.srt.arg_groups.speculative_hook": {
        "_handle_eagle_family": "server_args ...",
        "_auto_choose_speculative_params": "server_args model_arch ...",
        "_handle_dflash": "server_args ...",
        "_handle_dspark": "server_args ...",
        "_disable_overlap_schedule_for_cpu": "server_args",
    },
    "sglang.srt.server_args": {"prepare_server_args": "argv"},
    "sglang.srt.utils.device_timer": {"device_timer_ctx": "timer category"},
    "sglang.srt.runtime_context": {"publish": "server_args role ..."},
    "sglang.srt.sampling.sampling_params.SamplingParams": {"verify": "self vocab_size", "custom_params": ""},
    "sglang.srt.arg_groups.overrides": {"declare_resolution": "server_args source fields", "resolving_view": ""},
    # Who makes the worker, and what the worker is.
    "sglang.srt.managers.scheduler.Scheduler": attributes(
        "maybe_init_draft_worker init_model_worker init_all_cuda_graphs init_all_attention_backends run_batch"
    ),
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2": {
        "__init__": "self server_args gpu_id nccl_port target_worker",
        "init_attention_backends": "self",
        "init_cuda_graphs": "self",
        "forward_batch_generation": "self batch on_publish grammar_barrier pp_proxy_tensors",
        "_forward_prefill_batch": "self batch on_publish pp_proxy_tensors ...",
        **attributes("req_to_token_pool token_to_kv_pool_allocator last_shared_read_runner"),
    },
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker": {
        "init_attention_backend": "self",
        "init_lm_head": "self",
        "_capture_cuda_graphs": "self",
        "draft": "",
        "_draft_extend_for_prefill": "self batch target_hidden_states next_token_ids ...",
        "_rebuild_topk1_chain_buffers": "self",
        **attributes("draft_runner hot_token_id target_worker topk device"),
    },
    "sglang.srt.managers.tp_worker.TpModelWorker": {
        "init_cuda_graphs": "self capture_decode_cuda_graph",
        **attributes("random_seed model_runner"),
    },
    "sglang.srt.layers.sampler.Sampler": {
        "__init__": "self",
        "_sample_from_probs": "self probs sampling_info positions simple_sampling_case",
        "_preprocess_logits": "",
    },
    "sglang.srt.model_executor.model_runner.ModelRunner": {
        "load_model": "self",
        "attn_tp_sequence_sharded": "self num_tokens",
        **attributes("kv_cache_dtype graph_shared_output device_timer"),
    },
    "sglang.srt.layers.sampler": {"apply_custom_logit_processor": "logits sampling_batch_info ..."},
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": {
        "_select_runners": "self selector",
        **attributes("draft_worker _session"),
    },
    "sglang.srt.lora.lora_manager.LoRAManager": {
        "prepare_lora_batch": "self forward_batch",
        "fetch_new_loras": "self new_loras ...",
        "lora_backend": "",
    },
    "sglang.srt.lora.backend.base_backend.BaseLoRABackend": {"reset_batch_state": "self", "is_moe_lora": ""},
    "sglang.srt.lora.backend.chunked_backend.ChunkedSgmvLoRABackend": {"name": ""},
    # What goes in and out.
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": attributes(
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum positions spec_info"
        " spec_algorithm capture_hidden_mode next_token_logits_buffer mrope_positions"
        # Of data-parallel attention.
        " global_num_tokens_cpu global_num_tokens_gpu global_num_tokens_for_logprob_cpu"
        " global_num_tokens_for_logprob_gpu dp_padding_mode global_dp_buffer_len attn_tp_sequence_sharded"
    ),
    "sglang.srt.layers.dp_attention": {
        "set_dp_buffer_len_from_batch": "forward_batch",
        "set_is_extend_in_batch": "is_extend_in_batch",
    },
    "sglang.srt.layers.dp_attention.DpPaddingMode": attributes("MAX_LEN"),
    "sglang.srt.managers.schedule_batch.ScheduleBatch": attributes(
        "multimodal_inputs is_extend_in_batch extend_lens prefix_lens"
    ),
    "sglang.srt.managers.schedule_batch.MultimodalInputs": attributes("mrope_position_delta"),
    "sglang.srt.managers.utils.GenerationBatchResult": attributes(
        "logits_output next_token_ids can_run_cuda_graph speculative_num_draft_tokens speculative_output_stride"
        " accept_lens new_seq_lens next_draft_input copy_to_cpu"
    ),
    "sglang.srt.speculative.eagle_info.EagleVerifyInput": attributes(
        "draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling retrieve_cum_len"
        " spec_steps topk draft_token_num capture_hidden_mode seq_lens_sum seq_lens_cpu prepared_out_cache_loc"
    ),
    "sglang.srt.speculative.eagle_info.EagleDraftInput": attributes(
        "topk_p topk_index hidden_states bonus_tokens num_tokens_per_req"
    ),
    "sglang.srt.speculative.eagle_info.EagleDraftExtendInput": attributes(
        "hidden_states num_correct_drafts num_accept_tokens num_tokens_per_req select_index"
    ),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": attributes(
        "temperatures top_ps top_ks min_ps sampling_seed logit_bias grammars is_all_greedy acc_additive_penalties"
        " acc_scaling_penalties has_custom_logit_processor"
    ),
    "sglang.srt.layers.logits_processor.LogitsMetadata": attributes("draft_extend_select_index"),
    "sglang.srt.speculative.spec_utils": {
        "build_grammar_vocab_mask": "reqs tree sampling_info device barrier",
        "draft_tp_context": "",
    },
    "sglang.srt.speculative.spec_utils.GrammarTree": {
        "from_device": "cls retrieve_next_token retrieve_next_sibling draft_token"
    },
    "sglang.srt.distributed.parallel_state.GroupCoordinator": {
        "broadcast": "self input_ src",
        **attributes("world_size rank_in_group cpu_group ca_comm"),
    },
    # Memory and attention.
    "sglang.srt.layers.radix_attention.RadixAttention": attributes("k_scale v_scale sliding_window_size"),
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend": {
        "forward": "self q k v layer forward_batch save_kv_cache ..."
    },
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": attributes("data_ptrs data_strides use_hnd k_buffer v_buffer"),
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool": attributes("req_to_token free_slots"),
    # Graphs, which a GPU alone has.
    "sglang.srt.distributed.parallel_state": {"graph_capture": "stream", "_groups": ""},
    "sglang.srt.distributed.device_communicators.custom_all_reduce_v2.CustomAllReduceV2": attributes("_graph_inputs"),
    "sglang.srt.model_executor.graph_shared_output.GraphSharedOutput": {
        "get_logits_buffer": "self vocab_size rows",
        **attributes("max_rows _logits_buffers"),
    },
    "sglang.srt.model_executor.runner_utils.capture_mode": {"model_capture_mode": ""},
    "sglang.srt.model_executor.cuda_graph_config": {"check_cuda_graph_backend": "phase backend ..."},
    # What is counted.
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor": {
        "_resolve_spec_v2_tokens": "self result batch",
        "metrics_reporter": "",
    },
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter": attributes(
        "metrics_collector current_scheduler_metrics_enabled"
    ),
    "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector": attributes("labels"),
    "sglang.srt.managers.schedule_batch.Req": {
        "get_fill_ids": "self",
        "update_finish_state": "self new_accepted_len",
        "_compute_max_prefix_len": "self input_len",
        **attributes(
            "finished finished_reason finished_len to_finish grammar output_ids sampling_params rid lora_id"
            " multimodal_inputs input_embeds origin_input_ids tokenizer eos_token_ids"
        ),
    },
    # What is refused where our rounds serve.
    "sglang.srt.speculative.spec_sampling_mask": {"validate_spec_sampling_mask_request": "req spec_algorithm"},
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController": {
        "_validate_accept_threshold": "self key value",
    },
    "sglang.srt.managers.tokenizer_manager.TokenizerManager": {
        "_calculate_spec_decoding_metrics": "self meta_info recv_obj i",
        **attributes("init_running_status server_status"),
    },
    "sglang.srt.utils.common": {"kill_process_tree": "parent_pid include_parent ..."},
    # Block drafters.
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2": {"__init__": ""},
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm": {"is_dflash": "self"},
    "sglang.srt.speculative.draft_worker_common": {"make_draft_input_v2": "bonus_tokens new_seq_lens"},
    "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2": attributes("bonus_tokens new_seq_lens"),
    "sglang.srt.models.dflash.DFlashDraftModel": {
        "forward": "self input_ids positions forward_batch input_embeds ...",
        "project_target_hidden": "self target_hidden",
        "prepare_context_hidden_for_kv": "self layer ctx_hidden",
        **attributes("layers config"),
    },
    "sglang.srt.models.dspark.VanillaMarkov": {"step_bias": "self prev_tokens hidden_states state"},
    "sglang.srt.models.dflash.DFlashAttention": {
        "kv_proj_only": "self hidden_states",
        "apply_k_norm": "self k",
        "apply_k_rope": "self positions k",
        **attributes("attn num_kv_heads head_dim use_table_qk_norm_rope"),
    },
    "sglang.srt.layers.logits_processor.LogitsProcessor": {
        "_compute_lm_head": "self hidden_states lm_head ...",
        "forward": "self input_ids hidden_states ...",
    },
    "sglang.srt.mem_cache.memory_pool.KVCache": {
        "get_key_buffer": "self layer_id",
        "get_value_buffer": "self layer_id",
    },
    # A head's class and its linear layers.
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod": {"apply": "self layer x bias"},
    "sglang.srt.configs.model_config": {"is_minimax_sparse": "config"},
    "sglang.srt.configs.model_config.ModelConfig": {
        "_config_draft_model": "self",
        **attributes("attention_arch model_is_mrope is_multimodal image_token_id num_nextn_predict_layers"),
    },
    "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3": {
        "__init__": "self ...",
        "load_weights": "self weights",
        **attributes("config model _draft_window_size get_attention_sliding_window_size"),
    },
}
