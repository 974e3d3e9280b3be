"""Pins what of SGLang the self-test of a server and the fallback to the engine's own worker rely on."""

from __future__ import annotations

import pytest
from engine_signatures import assigned, assignments, calls, holds, in_order, parameters

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

from eagle_plugin.sglang.drafter import TreeDrafter
from eagle_plugin.sglang.fallback import _restore
from eagle_plugin.sglang.worker import TreeWorker


def test_the_worker_is_made_before_the_cache_and_captured_after_it():
    """So the factory asks for what will be made, and the round is tested where its pools exist and nobody uses them."""
    assert in_order(
        Scheduler.init_model_worker,
        [
            "self.maybe_init_draft_worker()",
            "self.init_memory_pools()",
            "self.init_all_attention_backends()",
            "self.init_all_cuda_graphs()",
        ],
    )
    assert holds(MHATokenToKVPool.__init__, "self.use_hnd = envs.SGLANG_USE_HND_KVCACHE.get()")
    assert hasattr(envs, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
    assert calls(ModelRunner.initialize, "self.configure_kv_cache_dtype")  # at the load of the weights


@pytest.mark.parametrize("allocator", [TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator])
def test_slots_are_borrowed_and_given_back(allocator):
    assert parameters(allocator.alloc)[-1] == "need_size" and parameters(allocator.free)[-1] == "free_index"
    assert callable(allocator.available_size)
    assert assignments(allocator.alloc, "self.free_pages")


def test_what_is_read_of_models_and_pools():
    read = {"tp_q_head_num", "tp_k_head_num", "qk_head_dim", "logit_cap", "sliding_window_size"}
    assert read <= assigned(RadixAttention.__init__)


def test_the_engines_worker_has_nothing_that_ours_has_not():
    """The fallback changes classes: what the engine's constructors set must be there."""
    assert issubclass(TreeWorker, EAGLEWorkerV2) and issubclass(TreeDrafter, EagleDraftWorker)
    assert "__init__" not in vars(TreeDrafter)
    assert not assigned(EAGLEWorkerV2.__init__) - assigned(TreeWorker.__init__)


def test_the_fallback_runs_the_steps_that_ours_replace():
    ours, engines = vars(TreeDrafter), vars(EagleDraftWorker)
    replaced = {name for name in ours if name in engines and callable(ours[name])}
    # `draft` is no step of the start, but of every round; `init_lm_head` is the engine's own.
    assert replaced == {"init_attention_backend", "_capture_cuda_graphs", "draft", "init_lm_head"}
    assert calls(TreeDrafter.init_lm_head, "super().init_lm_head")
    assert calls(_restore, "drafter.init_attention_backend") and calls(_restore, "drafter._capture_cuda_graphs")
    assert calls(_restore, "runner.init_decode_cuda_graph") and callable(ModelRunner.init_decode_cuda_graph)
    sharding = "parallel_layout" if "parallel_layout" in assigned(EagleDraftWorker) else "draft_owns_attention"
    contexts = ["draft_pp_context()", f"draft_tp_context(self.{sharding})", "speculative_moe_backend_context()"]
    for step in (EagleDraftWorker.init_attention_backends, EagleDraftWorker.init_cuda_graphs):
        assert in_order(step, contexts)
    assert calls(EagleDraftWorker.init_attention_backends, "self.init_attention_backend")
    assert calls(EagleDraftWorker.init_cuda_graphs, "self._capture_cuda_graphs")
