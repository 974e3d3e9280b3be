"""Experts of other ranks (--ep-size): the engine names them -1, which its torch code takes for a column of its own."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from eagle_sglang_cpu.llama4 import EXPERTS


def leave_out_others(
    run: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """Run this rank's experts [N, H] -> [N, H]: each pair of a token and an expert as a token with one expert."""
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if layer.moe_ep_size == 1:  # whole rows of padding at most, and no shape may depend on them: this can be captured
        some = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device)  # the engine wants different ones
        ids, weights = torch.where(ids < 0, some, ids), weights.masked_fill(ids < 0, 0)
        return run(layer, x, topk_output._replace(topk_ids=ids, topk_weights=weights), config)
    tokens, places = (ids >= 0).nonzero(as_tuple=True)
    if len(tokens) == ids.numel():
        return run(layer, x, topk_output, config)
    out = torch.zeros_like(x)
    if not len(tokens):
        return out
    pairs = topk_output._replace(topk_ids=ids[tokens, places, None], topk_weights=weights[tokens, places, None])
    return out.index_add_(0, tokens, run(layer, x[tokens], pairs, config))


def register() -> None:
    """Register the hook with SGLang's HookRegistry."""
    HookRegistry.register(EXPERTS, leave_out_others, HookType.AROUND)
