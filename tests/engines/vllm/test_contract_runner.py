"""Pins what vLLM's model runner and its attention do where the adapter touches them; their names are in one table."""

from __future__ import annotations

import inspect

import pytest
from engine_signatures import assignments, calls, holds, in_order, parameters, returned
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.model_executor.layers.attention import attention as attention_layer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends import registry
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker import cpu_worker, gpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu import warmup
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

from eagle_plugin.vllm.attention import TreeAttentionImpl, TreeMetadataBuilder
from eagle_plugin.vllm.backend import TreeAttentionBackend
from eagle_plugin.vllm.cpu_worker import TreeCPUModelRunner, TreeCPUWorker
from eagle_plugin.vllm.drafter import TreeProposer
from eagle_plugin.vllm.latent_attention import LatentMetadata
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.target_runner import TargetRunner
from eagle_plugin.vllm.tree_steps import TreeSteps
from eagle_plugin.vllm.worker import TreeWorker

# ---------------------------------------------------------------------------------------------------------------------
# The runner


@pytest.mark.parametrize(
    "name",
    ["__init__", "_update_states", "_prepare_inputs", "_model_forward", "_sample", "propose_draft_token_ids"],
)
def test_overridden_methods_agree(name: str) -> None:
    ours = parameters(getattr(TreeModelRunner, name))
    assert ours == parameters(getattr(CPUModelRunner, name)) == parameters(getattr(GPUModelRunner, name))


def test_ours_come_before_those_of_a_cpu() -> None:
    """A method of ours calls the engine's for the device at hand: of a CPU, or of a GPU."""
    assert TreeCPUModelRunner.__mro__[1:6] == (
        TreeModelRunner,
        TreeSteps,
        TargetRunner,
        CPUModelRunner,
        GPUModelRunner,
    )
    assert TreeCPUWorker.__mro__[1:4] == (TreeWorker, cpu_worker.CPUWorker, gpu_worker.Worker)
    assert (
        TreeModelRunner.__mro__[1:4] == (TreeSteps, TargetRunner, GPUModelRunner)
        and TreeWorker.__mro__[1] is gpu_worker.Worker
    )


def test_the_runner_calls_what_we_override() -> None:
    step, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
    assert calls(step, "self._update_states") == ["self._update_states(scheduler_output)"]
    assert calls(step, "_prepare_inputs") == ["self._prepare_inputs(scheduler_output, num_scheduled_tokens_np)"]
    assert len(calls(step, "_build_attention_metadata")) == 1
    assert calls(sample, "self._sample") == ["self._sample(logits, spec_decode_metadata)"]
    assert len(calls(sample, "self.propose_draft_token_ids")) == 1
    # Its books wind generators back, which those of a CPU cannot, and read them from the batch.
    assert len(calls(sample, "self._bookkeeping_sync")) == 1
    assert holds(GPUModelRunner._bookkeeping_sync, "self.input_batch.generators")
    # The tuples that they yield: metadata of the drafts second, metadata of the layers first.
    assert returned(GPUModelRunner._prepare_inputs)[-1].startswith("(logits_indices, spec_decode_metadata, ")
    assert returned(GPUModelRunner._build_attention_metadata)[-1] == "(attn_metadata, spec_decode_common_attn_metadata)"


def test_drafts_may_have_another_width_in_every_step() -> None:
    """Scheduled one step at a time, the engine takes as many tokens per request as there are, also none."""
    copied = GPUModelRunner._copy_draft_token_ids_to_cpu
    assert holds(copied, "num_spec_tokens = draft_token_ids.shape[1]")
    assert returned(GPUModelRunner._get_draft_token_ids_cpu)[-1].startswith(
        "(self.draft_token_ids_cpu[:len(req_ids), :num_spec_tokens].tolist(), "
    )
    # Both find our buffer, which has exactly as many places.
    assert holds(
        copied, "self.draft_token_ids_cpu[:num_reqs, :num_spec_tokens].copy_(draft_token_ids, non_blocking=True)"
    )
    assert calls(EngineCore.post_step, "update_draft_token_ids")
    # Scheduled ahead, it puts as many placeholders as it was started with.
    assert holds(
        AsyncScheduler._update_after_schedule,
        "self._spec_token_placeholders = [-1] * scheduler_output.num_spec_tokens_to_schedule",
    )


def test_what_a_round_yielded_is_on_the_host_after_the_books() -> None:
    """The fourth of the values that _bookkeeping_sync returns has each request's tokens."""
    *_, books = returned(GPUModelRunner._bookkeeping_sync)
    assert books.strip("()").split(", ")[3] == "valid_sampled_token_ids"
    assert holds(Scheduler._preempt_request, "self.reset_preempted_req_ids.add(request.request_id)")


def test_what_a_step_scheduled_ahead_yielded_is_read_in_the_next_one() -> None:
    """vLLM reads the numbers of accepted tokens itself, after the forward was launched: we wait for nothing else."""
    assert holds(GPUModelRunner._update_states, "valid_sampled_token_count = self._get_valid_sampled_token_count()")
    assert holds(GPUModelRunner.execute_model, "deferred_state_corrections_fn()")
    # It reads drafts at a stride of those that the last step gave, so that these are no fewer than placeholders.
    assert holds(GPUModelRunner._prepare_input_ids, "start = prev_index * self.prev_num_spec_tokens")
    assert holds(
        GPUModelRunner._copy_draft_token_ids_to_cpu, "self.prev_num_spec_tokens = self._draft_token_ids.shape[1]"
    )
    assert holds(AsyncGPUModelRunnerOutput.get_output, "output = self._model_runner_output")


def test_costs_are_measured_before_the_first_request() -> None:
    """With the engine's own calls of the target, after its caches are there; the random seed is set again then."""
    start = ["initialize_from_config(kv_cache_configs)", "compile_or_warm_up_model()"]
    assert in_order(EngineCore._initialize_kv_caches, [f"self.model_executor.{call}" for call in start])
    seed = "set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)"
    for worker in (cpu_worker.CPUWorker.compile_or_warm_up_model, TreeWorker.begin_rounds):
        assert calls(worker, "set_random_seed") == [seed]
    selected = parameters(GPUModelRunner.maybe_select_dummy_loras)
    assert {"lora_config", "num_scheduled_tokens", "num_sampled_tokens"} < set(selected)


def test_caches_are_made_by_their_configuration() -> None:
    assert parameters(CPUModelRunner.initialize_kv_cache)[1] == "kv_cache_config"


def test_the_batch_and_the_scheduler() -> None:
    assert isinstance(InputBatch.req_ids, property)
    # Trees may be cut, never reordered: nodes after the last scheduled one are gone.
    assert "spec_token_ids[:num_scheduled_spec_tokens]" in assignments(Scheduler.schedule, "spec_token_ids")


def test_slots_are_reserved_for_the_levels_of_a_draft() -> None:
    """As many as the property says that we hook into, whatever schedules a step or warms up."""
    assert any(
        "num_lookahead_tokens=self.num_lookahead_tokens" in c for c in calls(Scheduler.schedule, "allocate_slots")
    )
    wanted = ["vllm_config.num_lookahead_tokens"]
    assert assignments(Scheduler.__init__, "self.num_lookahead_tokens") == wanted
    assert "model_runner.vllm_config.num_lookahead_tokens" in inspect.getsource(warmup)
    assert isinstance(VllmConfig.num_lookahead_tokens, property)


def test_the_mask_of_a_head_is_kept_under_one_flag() -> None:
    """masked_rows.py switches it on while the head's class is made and loaded, and off for all that plans a step."""
    assert calls(SpecDecodeBaseProposer.load_model, "self._get_model") == ["self._get_model()"]
    flag = "speculative_config.parallel_drafting"
    assert assignments(Eagle3LlamaForCausalLM.__init__, "self.use_parallel_drafting") == [flag]
    assert holds(Eagle3LlamaForCausalLM.load_weights, "self.mask_hidden.copy_(loaded_weight.view(1, -1))")
    own = "self.model.combine_hidden_states(flat_mask)"
    assert calls(SpecDecodeBaseProposer.load_model, "self.model.combine_hidden_states") == [own]
    slots = SpeculativeConfig.max_num_new_slots_for_drafting
    assert holds(slots.fget, "self.parallel_drafting") and returned(slots.fget)[-1] == "0"
    names = {"PeagleLlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
    assert {_SPECULATIVE_DECODING_MODELS[name][1] for name in names} == {Eagle3LlamaForCausalLM.__name__}


def test_a_head_can_be_loaded_again() -> None:
    """head_exchange.py: the layers that a load adds are known by the names that it finds in one table."""
    load = SpecDecodeBaseProposer.load_model
    assert parameters(load)[:2] == ["self", "target_model"]
    assert calls(load, "self._get_model") and holds(load, "get_layers_from_vllm_config")
    assert holds(attention_layer, "compilation_config.static_forward_context[prefix] = self")


def test_the_heads_linear_layers_can_be_given_another_method() -> None:
    """draft_weights.py: weights are processed once they are loaded, and layers call quant_method.apply."""
    method, process = UnquantizedLinearMethod, process_weights_after_loading
    assert holds(process, "quant_method.process_weights_after_loading(module)")
    assert holds(method.process_weights_after_loading, "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)")
    for kind, given in (
        (ReplicatedLinear, "self, x, bias"),
        (ColumnParallelLinear, "self, input_, bias"),
        (RowParallelLinear, "self, input_parallel, bias_"),
    ):
        assert calls(kind.forward, "quant_method.apply") == [f"self.quant_method.apply({given})"]
    (call,) = [x for x in calls(LogitsProcessor._apply_head, ".apply") if x.startswith("lm_head.quant_method")]
    assert call == "lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)"


def test_the_token_after_a_part_of_a_prompt() -> None:
    """vLLM gives the last token of the prompt; the drafter gives the next one, by what the runner knows of the step."""
    ours, engines = TreeProposer.prepare_next_token_ids_padded, SpecDecodeBaseProposer.prepare_next_token_ids_padded
    assert parameters(ours) == parameters(engines)
    assert holds(engines, "gpu_input_batch.num_tokens_no_spec[i] - 1")
    assert parameters(TreeProposer.__init__) == parameters(EagleProposer.__init__)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def test_backends_are_overridden_by_name() -> None:
    enum = registry.AttentionBackendEnum.CPU_ATTN
    assert isinstance(registry._ATTN_OVERRIDES, dict) and enum not in registry._ATTN_OVERRIDES
    path = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"
    registry.register_backend(enum, path)
    try:
        assert registry._ATTN_OVERRIDES[enum] == path
        assert enum.get_class() is TreeAttentionBackend
    finally:
        registry._ATTN_OVERRIDES.pop(enum)
    assert enum.get_class() is not TreeAttentionBackend
    assert callable(selector._cached_get_attn_backend.cache_clear)
    assert TreeAttentionBackend.get_name() in registry.AttentionBackendEnum.__members__
    assert "AttentionBackendEnum[self.attn_backend.get_name()]" in assignments(attention_layer, "self.backend")


def test_layers_and_builders_are_called_as_ours_expect() -> None:
    ours, engines = parameters(TreeAttentionImpl.__init__), parameters(AttentionImpl.__init__)
    assert ours[: len(engines)] == engines and ours[len(engines) :] == ["sinks"]
    assert parameters(TreeAttentionImpl.forward) == parameters(AttentionImpl.forward)
    assert parameters(TreeMetadataBuilder.__init__) == parameters(AttentionMetadataBuilder.__init__)
    assert parameters(TreeMetadataBuilder.build) == parameters(AttentionMetadataBuilder.build)
    assert parameters(TreeAttentionImpl.process_weights_after_loading) == ["self", "act_dtype"]


def test_latent_layers_take_all_rows_for_those_of_decoding() -> None:
    """latent_attention.py: vLLM's layer stores the rows, and asks its backend for the attention of decoding alone."""
    forward = MLAAttention.forward_impl
    (asked,) = calls(forward, "self.impl.forward_mqa")
    assert asked == "self.impl.forward_mqa(mqa_q, kv_cache, attn_metadata, self)"
    assert "attn_metadata.num_decode_tokens" in assignments(forward, "num_mqa_tokens")
    assert "attn_metadata.num_actual_tokens" in assignments(forward, "num_actual_toks")
    read = {"num_actual_tokens", "num_decode_tokens", "num_decodes", "num_prefills", "decode"}
    assert all(hasattr(LatentMetadata, name) for name in read)
    assert len(calls(MLAAttention.update_kv_cache, "self.impl.do_kv_cache_update")) == 1
    assert calls(MLAAttention.bind_kv_cache, "kv_cache.squeeze") == ["kv_cache.squeeze(1)"]


def test_blocks_of_the_cache_are_dense() -> None:
    """token_rows reads a layer's cache as tokens one after the other, with the heads of each in order."""
    (layout,) = TreeAttentionBackend.supported_kv_cache_layouts()
    assert layout is KVCacheLayout.LBNHC
    assert layout.is_layer_compact and layout.is_block_compact
    assert layout.layer_view_order == (0, 2, 1, 3)
