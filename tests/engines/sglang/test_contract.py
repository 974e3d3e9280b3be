"""Pins what SGLang's worker and scheduler do where the adapter touches them; a new release fails here first.

Names, fields and parameters are in one table, `eagle_plugin/sglang/engine_contract.py`, from which
tests/engines/test_engine_contract.py is generated. Here is what a table cannot say.
"""

from __future__ import annotations

import ast
import dataclasses
import pkgutil

import pytest
from engine_signatures import assigned, assignments, calls, fields, holds, in_order, parameters, returned

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang.srt.arg_groups.fields.parallel import Parallel
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.entrypoints import http_server
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

from eagle_plugin.sglang import plugin, traffic, version
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.drafter import TreeDrafter
from eagle_plugin.sglang.sampling import SeededSampler
from eagle_plugin.sglang.worker import TreeWorker


def test_version_is_a_tested_one():
    assert version.installed() in version.TESTED


@pytest.mark.parametrize(
    "target",
    [
        plugin.CREATE_WORKER,
        plugin.RESOLVE_ARGUMENTS,
        plugin.RESOLVE_BLOCK_ARGUMENTS,
        plugin.RESOLVE_MARKOV_ARGUMENTS,
        plugin.AUTO_PARAMETERS,
        plugin.OVERLAP_ON_CPU,
        plugin.ROW_ROOM,
        plugin.DECODE_ROOM,
    ],
)
def test_hook_targets_resolve(target):
    assert callable(pkgutil.resolve_name(target))


def test_hook_signatures():
    assert parameters(HookRegistry.register)[:3] == ["target", "hook", "hook_type"]
    assert parameters(pkgutil.resolve_name(plugin.RESOLVE_ARGUMENTS))[:1] == ["server_args"]
    assert parameters(pkgutil.resolve_name(plugin.AUTO_PARAMETERS))[:2] == ["server_args", "model_arch"]


def test_a_server_that_starts_says_so():
    assert "_global_state" in vars(http_server) and ServerStatus.Starting != ServerStatus.Up


def test_rounds_are_counted_once_per_finished_request():
    assert parameters(pkgutil.resolve_name(traffic.COUNT_DRAFTS)) == ["self", "meta_info", "recv_obj", "i"]
    handle = TokenizerManager._handle_batch_output
    finished = "state.time_stats.set_finished_time(ts=first_output_time, span_attrs=span_attrs)"
    assert in_order(handle, [finished, "self._calculate_spec_decoding_metrics(meta_info, recv_obj, i)"])


def test_the_scheduler_builds_workers_with_four_keywords():
    make = Scheduler.maybe_init_draft_worker
    assert assignments(make, "DraftWorkerClass") == ["self.spec_algorithm.create_worker(self.server_args)"]
    assert "DraftWorkerClass(**draft_worker_kwargs)" in assignments(make, "self.draft_worker")
    (keywords,) = assignments(make, "draft_worker_kwargs")
    given = [keyword.arg for keyword in ast.parse(keywords, mode="eval").body.keywords]
    assert given == parameters(TreeWorker) == ["server_args", "gpu_id", "nccl_port", "target_worker"]


def test_our_constructor_sets_what_the_engines_sets():
    missing = assigned(EAGLEWorkerV2.__init__) - assigned(TreeWorker.__init__)
    assert not missing


def test_overridden_methods_exist_and_agree():
    assert parameters(TreeWorker.forward_batch_generation) == parameters(EAGLEWorkerV2.forward_batch_generation)
    assert "init_attention_backends" in vars(BaseSpecWorker)
    assert "init_attention_backend" in vars(EagleDraftWorker)
    assert assigned(EagleDraftWorker.init_attention_backend) <= assigned(TreeDrafter.init_attention_backend) | {
        "tree_mask_mode"
    }
    assert calls(EagleDraftWorker.init_attention_backends, "self.init_attention_backend")


def test_a_batch_has_no_other_field_without_a_default():
    required = {
        f.name for f in dataclasses.fields(ForwardBatch) if f.default is f.default_factory is dataclasses.MISSING
    }
    assert required == {
        "forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_sum",
    }  # fmt: skip


def test_the_token_after_a_prefill_is_drawn_where_we_draw_it():
    """SeededSampler replaces this one step of the engine's sampler, and gets probabilities at the request's T."""
    assert parameters(Sampler._sample_from_probs) == parameters(SeededSampler._sample_from_probs)
    assert in_order(Sampler.forward, ["logits.div_(sampling_info.temperatures)", "self._sample_from_probs"])
    assert calls(Sampler.forward, "self._sample_from_probs")
    (drawn,) = assignments(ModelRunner.sample, "next_token_ids")
    assert drawn.startswith("self.sampler(logits_output, forward_batch.sampling_info, ")


def test_all_ranks_draw_keys_from_one_seed():
    """Our keys come from TpModelWorker.random_seed, which the engine makes equal on all ranks."""
    seeds = assignments(TpModelWorker.__init__, "self.random_seed")
    assert any(seed.startswith("broadcast_pyobj([get_device().random_seed]") for seed in seeds)


def test_ranks_agree_over_the_engines_group():
    """ranks.py: one group of all ranks, whose broadcast writes the given tensor; NCCL's is used in graphs."""
    assert "world_size" in vars(GroupCoordinator)["__annotations__"]
    assert "self.pynccl_comm.broadcast(input_, src=src)" in calls(GroupCoordinator.broadcast, "broadcast")
    assert holds(Scheduler.init_model_worker, "get_parallel().tp_group") and hasattr(Parallel, "tp_rank")


def test_every_rank_has_the_logits_of_the_whole_vocabulary():
    """They are gathered, unless a worker (DFLASH's is the only one) asks to do it itself."""
    gathers = assignments(LogitsProcessor.__init__, "self.do_tensor_parallel_all_gather")
    assert "not skip_all_gather and get_parallel().tp_size > 1" in gathers
    assert assignments(LogitsProcessor, "self.defer_verify_gather") in ([], ["False"])  # none in older releases


def test_the_prefill_lists_as_many_tokens_as_the_drafter_asks_for():
    (top_m,) = calls(EagleDraftWorker._draft_extend_for_prefill, "fast_topk")
    assert top_m == "fast_topk(probs, self.topk, dim=-1)"


def test_a_forward_knows_whether_any_request_has_penalties():
    """`penalties.penalised` reads it."""
    assert calls(Scheduler._forward_isolation, "copy_for_forward") == ["sched_sampling_info.copy_for_forward()"]
    assert calls(SamplingBatchInfo.copy_for_forward, "update_penalties") == ["self.update_penalties()"]
    accumulated = assignments(SamplingBatchInfo.update_penalties, "self.acc_additive_penalties")
    assert len(accumulated) == 2 and accumulated[1] == "None"


def test_the_engines_order_of_transforms_is_ours():
    """Penalties, grammar, bias (logits.py has the same order); then custom processors, then NaN."""
    steps = ["_apply_pre_grammar_logits_transforms", "grammar_mask.apply", "_apply_post_grammar_logits_transforms"]
    assert in_order(SamplingBatchInfo.apply_logits_bias, [f"self.{step}(logits)" for step in steps])
    assert in_order(Sampler._preprocess_logits, ["apply_custom_logit_processor", "sanitize_nan_logits"])


def test_draft_state_keeps_no_field_unknown_to_us():
    """A new relayed field would have to be filled by TreeDrafter.extend."""
    assert fields(EagleDraftInput) <= {
        "topk_p", "topk_index", "draft_probs", "hidden_states", "capture_hidden_mode", "dsa_topk_indices",
        "bonus_tokens", "kv_indptr", "kv_indices", "window_kv_indptr", "window_kv_indices", "num_tokens_per_req",
        "num_tokens_for_logprob_per_req", "future_indices", "future_dsa_topk_indices_available",
        "cuda_graph_compatible",
    }  # fmt: skip


def test_called_functions_take_what_we_give():
    assert parameters(spec_utils.GrammarTree.from_device) == [
        "retrieve_next_token", "retrieve_next_sibling", "draft_token",
    ]  # fmt: skip
    forward = parameters(AttentionBackend.forward)
    assert forward[1:7] == ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"]


def test_the_scheduler_runs_one_round_ahead_on_what_we_leave():
    """worker.py: the event after our last read of shared tables, lengths that stay on the device, the padding row."""
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    assert assignments(Scheduler._apply_war_barrier, "runner") == ["self.model_worker.last_shared_read_runner"]
    assert assignments(Scheduler._apply_war_barrier, "ev") == ["runner.shared_read_done_event"]
    assert returned(EAGLEWorkerV2.last_shared_read_runner.fget)[-1] == "self._draft_worker.draft_runner"
    assert calls(overlap_utils.decide_needs_cpu_seq_lens, "getattr") == ["getattr(b, 'needs_cpu_seq_lens', True)"]
    assert isinstance(TreeAttention.needs_cpu_seq_lens, property)
    on_publish = [call for call in calls(Scheduler.run_batch, "partial") if "publish" in call]
    assert on_publish == ["partial(self.future_map.publish, future_indices)"]
    assert "torch.zeros((self._alloc_size, max_context_len), dtype=torch.int32, device=device)" in assignments(
        ReqToTokenPool.__init__, "self.req_to_token"
    )
    assert assignments(ReqToTokenPool.__init__, "self._alloc_size") == ["size + 1"]
    assert assignments(ReqToTokenPool.__init__, "self.free_slots") == ["list(range(1, self._alloc_size))"]


def test_graphs_are_captured_where_we_capture_them():
    """capture.py: names that only a GPU reaches; the engine captures no decode rounds of the target and the head."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor import cuda_graph_config
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    captured = decode_cuda_graph_runner.DecodeCudaGraphRunner
    assert calls(captured, "graph_capture") and calls(captured.__init__, "model_capture_mode")
    assert cuda_graph_config.Backend.DISABLED and cuda_graph_config.Phase.DECODE
    assert "bs" in cuda_graph_config.PhaseConfig.__annotations__
    assert in_order(
        Scheduler.init_all_cuda_graphs, ["self.tp_worker.init_cuda_graphs()", "self.draft_worker.init_cuda_graphs()"]
    )
    assert in_order(Scheduler.init_model_worker, ["self.init_all_attention_backends()", "self.init_all_cuda_graphs()"])
    assert calls(EagleDraftWorker.init_cuda_graphs, "self._capture_cuda_graphs") == ["self._capture_cuda_graphs()"]
    assert assigned(TreeDrafter._capture_cuda_graphs) <= assigned(EagleDraftWorker._capture_cuda_graphs)
    (buffer, *_) = assignments(LogitsProcessor._copy_logits_to_buffer, "logits_buffer")
    assert buffer == "logits_metadata.next_token_logits_buffer if use_buffer else None"


def test_the_output_stride_is_honoured():
    from sglang.srt.managers.scheduler_components import batch_result_processor as processor

    result = GenerationBatchResult(speculative_num_draft_tokens=8, speculative_output_stride=3)
    assert processor._get_speculative_output_stride(result) == 3


def test_a_request_is_finished_in_one_step_after_its_tokens_are_appended():
    """finish.py asks the step once per token: with fewer tokens in ``output_ids`` it must see no others."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    from eagle_plugin.sglang.finish import FINISH

    step = Req.update_finish_state
    assert pkgutil.resolve_name(FINISH) is step and parameters(step) == ["self", "new_accepted_len"]
    decode = SchedulerBatchResultProcessor.process_batch_result_decode
    assert in_order(decode, ["req.output_ids.extend(next_token_id)", "req.update_finish_state(new_accept_len)"])
    assert assignments(step, "new_accepted_tokens") == ["self.output_ids[-new_accepted_len:]"]
    (beyond,) = assignments(Req.tail_str, "tail_len")
    assert beyond == "self._stop_match_tail_len(new_accepted_len)"


def test_rounds_are_read_where_they_are_counted():
    """metrics.py: the scheduler's result processor has the lengths of a round on the host, and the metrics' labels."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    from eagle_plugin.sglang.metrics import READ_ROUND

    read = SchedulerBatchResultProcessor._resolve_spec_v2_tokens
    assert pkgutil.resolve_name(READ_ROUND) is read and parameters(read) == ["self", "result", "batch"]
    (counted,) = assignments(read, "result.num_correct_drafts_per_req_cpu")
    assert counted == "[length - num_non_draft for length in accept_lens]"
    assert holds(read, "req.is_retracted or req.finished()")
