"""Captures a runner's decode steps at start-up, for the batch sizes that memory allows."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import graph_capture
from vllm.model_executor.layers.attention.attention import unified_attention_with_output

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime import graph_emulator
from eagle_plugin.runtime.capturing import capturer_for, emulated, gpu_sizes, powers_of_two
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.ranks import ended_in_all_ranks
from eagle_plugin.vllm.attention import ExtendRows, Rows
from eagle_plugin.vllm.decode_step import DecodeStep, side_by_side
from eagle_plugin.vllm.dummy_batches import forward, layer_metadata, places_of, target_states
from eagle_plugin.vllm.graph_modes import is_compiled
from eagle_plugin.vllm.linear_attention import gated_delta_trees
from eagle_plugin.vllm.linear_step import LinearStep
from eagle_plugin.vllm.ranks import in_any_rank
from eagle_plugin.vllm.step_functions import TargetForward
from eagle_plugin.vllm.target_adapters import TargetAdapters, can_capture_adapters
from eagle_plugin.vllm.workspace import new_resources


def captured_steps(runner: Any, logger: logging.Logger) -> DecodeStep | None:
    """The captured functions of a `TreeModelRunner`'s steps, on a GPU, and on a CPU where graphs are emulated.

    Its caches must be there; what is captured writes into the block that vLLM gives to nobody. None: nothing is
    captured.
    """
    kind = runner.device.type
    if not (runner.wants_graphs if kind == "cuda" else emulated()):
        return None
    if reason := _unserved(runner, kind):
        logger.warning("eagle-plugin: decode steps run without graphs of their own: %s", reason)
        return None
    sizes = (gpu_sizes if kind == "cuda" else powers_of_two)(runner.max_num_reqs)
    head_rows = runner.drafter.masked_rows_per_request(runner._caps)
    sizes = [size for size in sizes if size * head_rows <= runner.max_num_tokens]
    flags = "--gpu-memory-utilization", "--max-num-seqs"
    # The custom all-reduce lists in C++, out of our reach, what was captured: it has to stay.
    parallel = runner.vllm_config.parallel_config
    may_repeat = parallel.world_size == 1 or parallel.disable_custom_all_reduce
    graph_memory = GraphMemory(kind, in_any_rank, logger, *flags, needed=runner.needed_bytes, may_repeat=may_repeat)
    # The operators find their layer and metadata in vLLM's context of one forward.
    attention = {
        torch.ops.vllm.unified_attention_with_output.default: unified_attention_with_output,
        torch.ops.eagle_plugin.gated_delta_trees.default: gated_delta_trees,
    }
    if kind != "cuda":
        graph_emulator.install()
    step = new_step(runner)
    step.narrows = runner._policy_mode == "auto"
    on_gpu = ended_in_all_ranks(graph_capture(runner.device), in_any_rank)
    with new_resources(), capturer_for(step, kind, logger, on_gpu, transparent=attention) as capturer:
        step.capture(capturer, _shapes(runner), sizes, graph_memory, with_sums=runner._policy_mode == "auto")
    return step


def _shapes(runner: Any) -> list[Shape]:
    """The shapes of rounds that get graphs: those that a policy chooses from, or those that there are without one."""
    caps: Shape = runner._caps
    if runner._policy_mode != "fixed":
        return captured_shapes(caps, runner.drafter.levels.kind)
    limited = sorted(caps.within_drafts(most) for most in set(runner._limits or []))
    return list(dict.fromkeys([PLAIN, *limited, caps]))


def _unserved(runner: Any, kind: str) -> str:
    """Why nothing can be captured; "" where it can."""
    if runner.model_config.use_mla:
        return "those of latent (MLA) attention are not captured yet"
    if runner.vllm_config.parallel_config.data_parallel_size > 1:
        return "the engines of a target with experts step together, each with a batch of its own"
    if kind != "cuda" and is_compiled(runner.vllm_config):
        return "the emulator sees nothing of compiled models, use --enforce-eager"
    return ""


def new_step(runner: Any) -> DecodeStep:
    """The functions of a `TreeModelRunner`'s steps, of which nothing is captured yet."""
    drafter, groups, caps = runner.drafter, runner._verifier.groups, runner._caps
    of_caches = {
        layer: i for i, group in enumerate(runner.kv_cache_config.kv_cache_groups) for layer in group.layer_names
    }
    tables = {
        layer: of_caches[layer]
        for layer in (next(iter(drafter._draft_attn_layer_names)), *(group.layer for group in groups))
    }
    linear = LinearStep(runner.linear, of_caches)
    # A step's slots reach over the rows of a tree and what is drafted after it.
    columns = runner.max_model_len + 2 * caps.reach + 2
    ranks = runner._verifier.ranks
    logits, states = _one_row(runner)
    target = logits, side_by_side(states[1:] or states)
    forward, synthetic = _target_forward(runner, states), runner._verifier.synthetic
    return DecodeStep(drafter, groups, caps, target, linear, columns, tables, ranks, forward, synthetic)


def _target_forward(runner: Any, like: list[Tensor]) -> TargetForward | None:
    """The target's forward, if nothing of it depends on what the host knows of a step; like: what it returns."""
    serves_adapters = runner.lora_config is not None
    if serves_adapters and not can_capture_adapters(runner):
        return None
    groups, head = runner.kv_cache_config.kv_cache_groups, runner.drafter._draft_attn_layer_names
    layers = {
        first.layer: [name for name in group.layer_names if name not in head]
        for first in runner._verifier.groups
        for group in groups
        if first.layer in group.layer_names
    }
    ids, _ = runner.query_rows()
    adapters = TargetAdapters(runner) if serves_adapters else None
    return TargetForward(partial(forward, runner), ids, runner.rotary_rows(), layers, like, adapters)


def _one_row(runner: Any) -> tuple[Tensor, list[Tensor]]:
    """Of one row, in the block that vLLM gives to nobody, the target's logits [1, V], and its states [1, H] with those
    that the head reads, if these are others."""
    nothing = torch.zeros(1, dtype=torch.int64, device=runner.device)
    owned = [nothing[:, None]] * len(runner.kv_cache_config.kv_cache_groups)
    rows = Rows(ExtendRows(nothing, nothing + 1, nothing + 1, nothing), None, extend_lens=[1])
    layers = layer_metadata(runner, places_of(runner, owned, 1), rows, nothing, nothing)
    one = np.ones(1, dtype=np.int32)
    with runner.maybe_select_dummy_loras(runner.lora_config, one, num_sampled_tokens=one):
        hidden, aux = target_states(runner, layers, nothing, nothing)
        return runner.model.compute_logits(hidden[:1]), [state[:1] for state in (hidden, *(aux or []))]
