"""The fault of stock vLLM's block drafters that docs/upstream.md names; run by `upstream_vllm.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from upstream_run import say
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

EPSILON = 1e-6


def context_norms(folder: Path) -> bool:
    """The norm of the context's keys of two layers with other weights, by vLLM's own method of the drafter."""
    generator = torch.Generator().manual_seed(0)
    keys, weights = torch.randn(2, 5, 2, 32, generator=generator), torch.rand(2, 32, generator=generator)
    drafter = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=EPSILON)
    found = DFlashQwen3Model._normalize_context_k(drafter, keys)
    unit = keys * (keys.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    nearest = [
        [torch.allclose(found[layer], unit[layer] * weights[by], atol=1e-5) for by in range(2)] for layer in range(2)
    ]
    for layer, by in enumerate(nearest):
        say(f"keys of layer {layer} are normed by the weights of layer", str([i for i, same in enumerate(by) if same]))
    return nearest == [[True, False], [True, False]]
