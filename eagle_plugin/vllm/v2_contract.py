"""The part of `engine_contract` for vLLM's V2 model runner."""

from __future__ import annotations

from eagle_plugin.runtime.engine_contract import Contract, attributes

_V2 = "vllm.v1.worker.gpu"

V2_CONTRACT: Contract = {
    f"{_V2}.model_runner.GPUModelRunner": {
        "__init__": "self vllm_config device",
        "load_model": "",
        "initialize_kv_cache": "self kv_cache_config ...",
        "finish_requests": "self scheduler_output",
        "prepare_inputs": "self scheduler_output ...",
        "prepare_attn": "self input_batch",
        "sample": "self hidden_states input_batch grammar_output",
        "sample_tokens": "self grammar_output",
        "take_draft_token_ids": "self",
        "maybe_select_dummy_loras": "",
        "_set_active_loras": "self prompt_lora_mapping token_lora_mapping lora_requests mapping_type",
        **attributes(
            "model sampler speculator req_states structured_outputs_worker input_buffers attn_groups kv_cache_config"
            " cache_config compilation_config device dtype lora_config max_model_len max_num_reqs max_num_tokens"
            " model_config num_speculative_steps speculative_config use_aux_hidden_state_outputs vllm_config lora_state"
            " model_state supports_mm_inputs cudagraph_manager uses_inputs_embeds"
        ),
    },
    f"{_V2}.input_batch": {
        "get_num_sampled_and_rejected": "num_sampled seq_lens cu_num_logits idx_mapping prefill_len"
    },
    f"{_V2}.input_batch.InputBatch": attributes(
        "req_ids idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos num_reqs num_tokens"
        " num_scheduled_tokens num_draft_tokens_per_req num_computed_tokens_np num_computed_prefill_tokens_np"
        " prefill_len_np seq_lens seq_lens_cpu_upper_bound input_ids positions logits_indices cu_num_logits"
        " cu_num_logits_np"
    ),
    f"{_V2}.input_batch.InputBuffers": attributes("input_ids positions is_padding"),
    f"{_V2}.cudagraph_utils.CudaGraphManager": {
        "dispatch": "self num_reqs num_tokens uniform_token_count num_active_loras max_query_len ..."
    },
    f"{_V2}.cudagraph_utils.BatchExecutionDescriptor": attributes("cg_mode num_tokens"),
    f"{_V2}.model_states.interface.ModelState": {"dummy_inputs_embeds": "self num_tokens"},
    f"{_V2}.lora_utils.LoraState": {"get_activate_loras": "self req_ids"},
    f"{_V2}.mm.rope.RopeState": attributes("positions"),
    f"{_V2}.states.RequestState": attributes("num_computed_tokens prefill_len"),
    f"{_V2}.async_utils.AsyncOutput": attributes("model_runner_output num_sampled_tokens_np copy_event"),
    f"{_V2}.structured_outputs.StructuredOutputsWorker": {
        "apply_grammar_bitmask": "self logits input_batch grammar_req_ids grammar_bitmask"
    },
    f"{_V2}.spec_decode.speculator.DraftModelSpeculator": {
        "__init__": "self vllm_config device",
        "load_draft_model": "self target_model target_attn_layer_names",
        "load_model": "self target_model",
        "init_cudagraph_manager": "self cudagraph_mode",
        "capture": "self",
        "propose": "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled"
        " num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run"
        " skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens",
        **attributes("vllm_config device draft_attn_layer_names draft_logits draft_tokens max_num_reqs model method"),
    },
    f"{_V2}.spec_decode.eagle.utils": {"load_eagle_model": "target_model vllm_config"},
    f"{_V2}.sample.output.SamplerOutput": attributes(
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected"
    ),
    f"{_V2}.sample.sampler.Sampler": {
        "get_logprobs_dims": "self idx_mapping_np ...",
        **attributes(
            "sampling_states logits_processors thinking_budget_state logprobs_mode logprob_token_ids_state compute_nans"
        ),
    },
    f"{_V2}.sample.states.SamplingStates": {
        "apply_temperature": "self logits expanded_idx_mapping idx_mapping_np",
        "apply_min_p": "self logits expanded_idx_mapping idx_mapping_np",
        "apply_top_k_top_p": "self logits expanded_idx_mapping idx_mapping_np",
        **attributes("temperature top_k top_p min_p seeds"),
    },
    f"{_V2}.sample.thinking_budget.ThinkingBudgetState": {
        "apply": "self logits ctx",
        **attributes("enabled use_thinking_budget"),
    },
    f"{_V2}.sample.logits_processor.loader": attributes("LOGITSPROCS_GROUP"),
    f"{_V2}.sample.logits_processor.interface.LogitsProcessor": {"apply": "self logits ctx"},
    f"{_V2}.sample.penalties.PenaltiesState": attributes(
        "use_penalty output_bin_counts prompt_bin_mask repetition_penalty frequency_penalty presence_penalty"
    ),
    f"{_V2}.sample.penalties": {
        "apply_penalties": "logits expanded_idx_mapping token_ids expanded_local_pos repetition_penalty"
        " frequency_penalty presence_penalty prompt_bin_mask output_bin_counts"
    },
    f"{_V2}.sample.bad_words.BadWordsState": attributes("num_bad_words"),
    f"{_V2}.sample.logit_bias.LogitBiasState": attributes("use_logit_bias"),
    f"{_V2}.sample.logprob": {
        "compute_topk_scores": "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state"
        " expanded_idx_mapping max_per_req_token_ids logits_mode"
    },
    f"{_V2}.metrics.logits": {"get_num_nans": "logits"},
}
