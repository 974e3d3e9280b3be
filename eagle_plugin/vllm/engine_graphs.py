"""Finds what vLLM runs a forward by for which we have captured nothing: a graph of its own, over padded rows, or none.

Attention stays outside of its graphs, so that they serve trees as well as plain steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from vllm.forward_context import BatchDescriptor


class EngineGraph(NamedTuple):
    """Of one forward."""

    rows: int  # padding included
    context: dict[str, Any]  # what vLLM's `set_forward_context` is told


def graph_of_v1(runner: Any, b: int, rows: int) -> EngineGraph:
    """What vLLM's V1 ``GPUModelRunner`` runs a step of b requests by that have so many rows each.

    Engines that step together find out here how many rows all of them have.
    """
    n = b * rows
    mode, descriptor, _, of_engines, _ = runner._determine_batch_execution_and_padding(
        num_tokens=n,
        num_reqs=b,
        num_scheduled_tokens_np=np.full(b, rows, dtype=np.int32),
        max_num_scheduled_tokens=rows,
        allow_microbatching=False,
        force_eager=runner.enable_prompt_embeds,  # its graphs read embeddings alone
    )
    context = {
        "cudagraph_runtime_mode": mode,
        "batch_descriptor": descriptor,
        "num_tokens_across_dp": of_engines,
        "is_padding": runner._prepare_padding_mask(n, descriptor.num_tokens),
    }
    return EngineGraph(descriptor.num_tokens, context)


def graph_of_v2(runner: Any, b: int, rows: int) -> EngineGraph:
    """The same of vLLM's V2 ``GPUModelRunner``, whose engines do not step together."""
    n, padding = b * rows, runner.input_buffers.is_padding
    if runner.uses_inputs_embeds and not runner.supports_mm_inputs:
        return EngineGraph(n, {})  # its graphs read embeddings alone
    found = runner.cudagraph_manager.dispatch(b, n, rows, 0, rows)
    padding[:n], padding[n : found.num_tokens] = False, True
    context = {
        "cudagraph_runtime_mode": found.cg_mode,
        "batch_descriptor": BatchDescriptor(found.num_tokens, has_lora=runner.lora_config is not None),
        "is_padding": padding[: found.num_tokens],
    }
    return EngineGraph(found.num_tokens, context)
