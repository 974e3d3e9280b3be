"""Lists the names of vLLM that the adapter replaces, calls or reads, with their parameters.

Names that the adapter imports are found by themselves; here is what it touches of them.
"""

from __future__ import annotations

from eagle_plugin.runtime.engine_contract import Contract, attributes
from eagle_plugin.vllm.attention_contract import ATTENTION_CONTRACT
from eagle_plugin.vllm.mtp_contract import MTP_CONTRACT
from eagle_plugin.vllm.v2_contract import V2_CONTRACT

_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_PROPOSERS = "vllm.v1.spec_decode.eagle.EagleProposer", "vllm.v1.spec_decode.dflash.DFlashProposer"

CONTRACT: Contract = {
    **V2_CONTRACT,
    **ATTENTION_CONTRACT,
    **MTP_CONTRACT,
    # Hooks of plugin.py.
    "vllm.platforms.cpu.CpuPlatform": {"check_and_update_config": "cls vllm_config"},
    "vllm.sampling_params.SamplingParams": {
        "_validate_spec_decode": "self speculative_config",
        **attributes(
            "thinking_token_budget extra_args skip_reading_prefix_cache stop_token_ids eos_token_id min_tokens"
            " max_tokens"
        ),
    },
    "vllm.engine.arg_utils.EngineArgs": {
        "create_speculative_config": "self ...",
        "from_cli_args": "cls ...",
        "create_engine_config": "self usage_context headless",
        **attributes("model speculative_config load_format"),
    },
    "vllm.entrypoints.cli.serve.ServeSubcommand": {"subparser_init": "self subparsers", "validate": "self args"},
    "vllm.config.SchedulerConfig": {
        "get_scheduler_cls": "self",
        **attributes(
            "scheduler_cls async_scheduling enable_chunked_prefill max_num_batched_tokens max_num_scheduled_tokens"
            " max_num_seqs disable_hybrid_kv_cache_manager"
        ),
    },
    _SCHEDULER: {
        "make_spec_decoding_stats": "self spec_decoding_stats num_draft_tokens ...",
        "update_draft_token_ids": "self draft_token_ids",
        "update_draft_token_ids_in_output": "self draft_token_ids scheduler_output",
        "update_from_output": "self scheduler_output model_runner_output",
        **attributes("vllm_config requests"),
    },
    "vllm.v1.request.Request": attributes("sampling_params spec_decode_metrics"),
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": {"_update_after_schedule": "self scheduler_output"},
    "vllm.v1.structured_output.StructuredOutputManager": {
        "validate_tokens": "self request spec_tokens",
        "grammar_bitmask": "self requests structured_output_request_ids scheduled_spec_decode_tokens",
        **attributes("backend _grammar_bitmask"),
    },
    "vllm.v1.structured_output.utils": {"strip_speculative_padding": "token_ids"},
    "vllm.v1.structured_output.backend_types.StructuredOutputGrammar": {
        "accept_tokens": "self request_id tokens",
        "fill_bitmask": "self bitmask batch_index",
        **attributes("rollback is_terminated"),
    },
    # The configuration.
    "vllm.config.VllmConfig": attributes(
        "model_config cache_config parallel_config scheduler_config device_config speculative_config compilation_config"
        " kv_transfer_config ec_transfer_config additional_config reasoning_config structured_outputs_config"
        " use_v2_model_runner num_lookahead_tokens attention_config lora_config kernel_config load_config"
        " profiler_config offload_config"
    )
    | {"_get_v1_model_runner_unsupported_features": "self", "_post_init_kv_transfer_config": "self"},
    "vllm.config.StructuredOutputsConfig": attributes("reasoning_parser"),
    "vllm.forward_context": {
        "set_forward_context": "attn_metadata vllm_config num_tokens num_tokens_across_dp cudagraph_runtime_mode"
        " batch_descriptor ubatch_slices slot_mapping skip_compiled is_padding"
    },
    "vllm.forward_context.BatchDescriptor": attributes("num_tokens has_lora"),
    "vllm.config.KernelConfig": attributes("moe_backend"),
    "vllm.config.AttentionConfig": attributes("backend backend_per_kind hisparse_config"),
    "vllm.config.SpeculativeConfig": attributes(
        "method model num_speculative_tokens draft_model_config parallel_drafting disable_padded_drafter_batch"
        " num_speculative_tokens_per_batch_size rejection_sample_method use_heterogeneous_vocab"
        " synthetic_acceptance_rates use_local_argmax_reduction disable_eagle_block_drop max_num_new_slots_for_drafting"
        " kv_cache_dtype dspark_draft_topk draft_load_config"
    ),
    "vllm.config.ParallelConfig": attributes(
        "worker_cls distributed_executor_backend rank world_size tensor_parallel_size pipeline_parallel_size"
        " data_parallel_size data_parallel_size_local data_parallel_index decode_context_parallel_size"
        " prefill_context_parallel_size enable_expert_parallel nnodes"
        " use_all2all all2all_backend enable_eplb disable_custom_all_reduce"
    ),
    "vllm.config.CacheConfig": attributes(
        "cache_dtype enable_prefix_caching mamba_cache_mode mamba_block_size kv_cache_dtype_skip_layers"
        " kv_offloading_size"
    ),
    "vllm.config.LoadConfig": attributes("load_format"),
    "vllm.config.OffloadConfig": attributes("offload_backend prefetch"),
    "vllm.config.PrefetchOffloadConfig": attributes("offload_group_size"),
    "vllm.config.ProfilerConfig": attributes("profiler proton_graph_attribution"),
    "vllm.config.ECTransferConfig": {"get_from_extra_config": "self key default", **attributes("ec_connector")},
    "vllm.config.ModelConfig": attributes(
        "model logprobs_mode architectures use_mla is_hybrid is_attention_free uses_mrope is_multimodal_model"
        " is_mm_prefix_lm is_encoder_decoder is_moe max_model_len enforce_eager dtype head_dtype"
        " logits_processors multimodal_config get_total_num_kv_heads get_head_size"
    )
    | {"get_vocab_size": "self"},
    "vllm.config.MultiModalConfig": attributes("language_model_only"),
    "vllm.config.CompilationConfig": attributes(
        "cudagraph_mode mode static_forward_context splitting_ops pass_config use_inductor_graph_partition"
    ),
    "vllm.config.PassConfig": attributes("fuse_attn_quant") | {"compute_hash": "self"},
    # The worker and its runner.
    "vllm.v1.worker.cpu_worker.CPUWorker": {
        "compile_or_warm_up_model": "self",
        "init_device": "self",
        "use_v2_model_runner": "",
    },
    "vllm.v1.worker.gpu_worker.Worker": {
        "_make_model_runner": "self",
        "_maybe_activate_jit_monitor": "self",
        "execute_dummy_batch": "self",
        "sample_tokens": "self grammar_output",
        "take_draft_token_ids": "self",
        **attributes(
            "model_runner vllm_config model_config device parallel_config use_v2_model_runner peak_activation_memory"
            " cudagraph_memory_estimate"
        ),
    },
    "vllm.utils.torch_utils": {"set_random_seed": "seed data_parallel_index"},
    "vllm.envs": attributes("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": {
        "__init__": "self vllm_config device",
        "load_model": "",
        "initialize_kv_cache": "self kv_cache_config ...",
        "_update_states": "self scheduler_output",
        "_prepare_inputs": "self scheduler_output num_scheduled_tokens",
        "_build_attention_metadata": "",
        "_sample": "self logits spec_decode_metadata",
        "_input_fits_in_drafter": "self common_attn_metadata",
        "_bookkeeping_sync": "",
        "propose_draft_token_ids": "self scheduler_output sampled_token_ids sampling_metadata hidden_states "
        "sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings",
        "take_draft_token_ids": "self",
        "_copy_valid_sampled_token_count": "self next_token_ids valid_sampled_tokens_count",
        "_get_valid_sampled_token_count": "self",
        "_copy_draft_token_ids_to_cpu": "self scheduler_output zeros_only",
        "sample_tokens": "self grammar_output",
        "get_model": "self",
        **attributes(
            "attn_groups cache_config compilation_config device discard_request_mask input_batch input_ids"
            " kv_cache_config max_num_reqs max_num_tokens model_config num_computed_tokens positions requests sampler"
            " speculative_config use_async_scheduling vllm_config optimistic_seq_lens_cpu max_model_len"
            " lora_config dtype use_aux_hidden_state_outputs num_spec_tokens drafter supports_mm_inputs uses_mrope"
            " mrope_positions enable_prompt_embeds is_token_ids effective_drafter_max_model_len"
            " draft_token_ids_cpu prev_num_spec_tokens inputs_embeds"
        ),
        "_determine_batch_execution_and_padding": "self num_tokens num_reqs num_scheduled_tokens_np"
        " max_num_scheduled_tokens use_cascade_attn allow_microbatching force_eager ...",
        "_prepare_padding_mask": "self num_tokens_unpadded num_tokens_padded",
        "_model_forward": "self input_ids positions intermediate_tensors inputs_embeds ...",
        "maybe_select_dummy_loras": "",
        "maybe_setup_dummy_loras": "self lora_config ...",
        "maybe_remove_all_loras": "self lora_config",
        "_set_active_loras": "self prompt_lora_mapping token_lora_mapping lora_requests ...",
    },
    "vllm.config.LoRAConfig": attributes("max_loras"),
    "vllm.lora.layers.BaseLayerWithLoRA": attributes("punica_wrapper"),
    "vllm.lora.request.LoRARequest": attributes("lora_name lora_int_id lora_path"),
    "vllm.v1.worker.gpu_input_batch.InputBatch": {
        "update_async_output_token_ids": "self",
        **attributes(
            "req_ids logitsprocs thinking_budget_state_holder sampling_metadata vocab_size generators"
            " num_computed_tokens_cpu num_prompt_tokens lora_id_to_lora_request"
        ),
    },
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": {
        "get_token_id": "self idx",
        **attributes("sampling_params num_prompt_tokens prompt_token_ids"),
    },
    "vllm.v1.worker.utils.AttentionGroup": {"get_metadata_builder": "self ubatch_id"},
    "vllm.v1.core.sched.output.SchedulerOutput": attributes(
        "finished_req_ids preempted_req_ids total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs"
        " pending_structured_output_tokens num_spec_tokens_to_schedule has_structured_output_requests"
    ),
    "vllm.v1.core.sched.output.NewRequestData": attributes(
        "req_id block_ids num_computed_tokens prompt_token_ids prefill_token_ids sampling_params lora_request"
        " mm_features"
    ),
    "vllm.v1.worker.gpu_model_runner.ExecuteModelState": attributes("hidden_states aux_hidden_states"),
    "vllm.model_executor.models.interfaces.EagleModelMixin": attributes("aux_hidden_state_layers"),
    "vllm.v1.core.sched.output.CachedRequestData": attributes(
        "req_ids resumed_req_ids new_block_ids num_computed_tokens"
    ),
    "vllm.v1.outputs.DraftTokenIds": attributes("req_ids draft_token_ids"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": attributes("kv_cache_groups num_blocks"),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": attributes("layer_names kv_cache_spec"),
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata": attributes("num_draft_tokens"),
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": {
        "execute_model": "self scheduler_output non_block",
        "sample_tokens": "self grammar_output non_block",
        "take_draft_token_ids": "self",
    },
    "vllm.distributed.parallel_state.GroupCoordinator": {
        "broadcast": "self input_ src",
        **attributes("world_size rank_in_group cpu_group"),
    },
    "vllm.distributed.parallel_state": {"graph_capture": "device"},
    "vllm.v1.worker.workspace.WorkspaceManager": {
        "get_persistent_resource": "self key factory",
        "is_locked": "self",
        "lock": "self",
        "unlock": "self",
    },
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts": attributes("apply"),
    # The head.
    **dict.fromkeys(
        _PROPOSERS,
        {
            "__init__": "self vllm_config device runner",
            "load_model": "self target_model",
            "_get_model": "self",
            "initialize_cudagraph_keys": "self cudagraph_mode",
            "validate_same_kv_cache_group": "self kv_cache_config",
            **attributes("propose dummy_run"),
            "prepare_next_token_ids_padded": "self sampled_token_ids requests gpu_input_batch discard_request_mask",
            **attributes(
                "_draft_attn_layer_names method model speculative_config vllm_config hidden_size dtype device"
                " max_num_tokens max_positions supports_mm_inputs uses_mrope positions"
            ),
        },
    ),
    "vllm.model_executor.models.qwen3_dflash.DFlashQwen3ForCausalLM": {
        "forward": "self input_ids positions inputs_embeds",
        "combine_hidden_states": "self hidden_states",
        "precompute_and_store_context_kv": "self context_states context_positions context_slot_mapping",
        "get_draft_attn_causal": "self",
        **attributes("draft_id_to_target_id lm_head logits_processor model"),
    },
    "vllm.model_executor.models.qwen3_dspark.Qwen3DSparkForCausalLM": {
        "markov_embed": "self token_ids",
        "markov_bias": "self markov_embed",
    },
    "vllm.model_executor.models.qwen3_dflash.DFlashQwen3Model": {
        "_normalize_context_k": "self all_k",
        **attributes("_k_norm_weights _rms_norm_eps"),
    },
    "vllm._custom_ops": {"rms_norm": "out input weight epsilon"},
    **dict.fromkeys(
        (
            "vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM",
            "vllm.model_executor.models.qwen3_eagle3.Eagle3Qwen3ForCausalLM",
        ),
        {
            "load_weights": "self weights",
            "forward": "self input_ids positions hidden_states inputs_embeds",
            "combine_hidden_states": "self hidden_states",
            **attributes("use_parallel_drafting draft_id_to_target_id lm_head logits_processor"),
        },
    ),
    "vllm.model_executor.models.interfaces.SupportsMultiModal": {
        "embed_input_ids": "self input_ids multimodal_embeddings is_multimodal",
        **attributes("requires_raw_input_tokens"),
    },
    "vllm.model_executor.layers.logits_processor.LogitsProcessor": attributes("head_dtype"),
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": "layer remove_weight"},
    "vllm.model_executor.layers.linear.UnquantizedLinearMethod": {
        "process_weights_after_loading": "self layer",
        "apply": "self layer x bias",
    },
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": {
        "process_weights_after_loading": "self layer",
        "apply": "self layer x bias",
    },
    # Sampling.
    "vllm.v1.sample.metadata.SamplingMetadata": attributes(
        "temperature all_greedy top_p top_k generators max_num_logprobs no_penalties prompt_token_ids"
        " frequency_penalties presence_penalties repetition_penalties output_token_ids allowed_token_ids_mask"
        " bad_words_token_ids logitsprocs logprob_token_ids thinking_budget_state_holder"
    ),
    "vllm.v1.sample.sampler.Sampler": {
        "compute_logprobs": "logits",
        "gather_logprobs": "logprobs num_logprobs token_ids",
        "gather_specific_token_logprobs": "self logprobs logprob_token_ids sampled",
    },
    "vllm.v1.sample.ops.topk_topp_sampler": {"apply_top_k_top_p": "logits k p ..."},
    "vllm.v1.sample.ops.bad_words": {"apply_bad_words": "logits bad_words_token_ids past_tokens_ids"},
    "vllm.v1.sample.ops.penalties": {
        "_convert_to_tensors": "output_token_ids vocab_size device",
        "apply_penalties": "logits prompt_tokens_tensor output_tokens_tensor presence_penalties frequency_penalties"
        " repetition_penalties",
    },
    "vllm.v1.sample.thinking_budget_state": {
        "maybe_create_thinking_budget_state_holder": "reasoning_config max_num_seqs num_spec_tokens device"
        " is_pin_memory",
    },
    # What is counted.
    "vllm.v1.spec_decode.metrics.SpecDecodingProm": {
        "__init__": "self speculative_config labelnames per_engine_labelvalues is_diffusion",
        "observe": "self spec_decoding_stats engine_idx",
    },
}
