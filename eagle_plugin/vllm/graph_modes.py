"""Reads what a configuration of vLLM says about graphs and compilation."""

from __future__ import annotations

from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode


def wants_graphs(vllm_config: Any) -> bool:
    """Whether a vLLM ``VllmConfig`` leaves CUDA graphs on, before the caches are made.

    Then vLLM writes the mode ``NONE`` into it where models are not compiled: its own graphs would have to leave out
    attention, which ours do not.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    return not vllm_config.model_config.enforce_eager and mode != CUDAGraphMode.NONE


def is_compiled(vllm_config: Any) -> bool:
    """Whether torch compiles the models of this ``VllmConfig``."""
    return bool(vllm_config.compilation_config.mode != CompilationMode.NONE)


def turned_full(vllm_config: Any) -> str:
    """The flag for which vLLM makes FULL of the mode of this ``VllmConfig`` after it has asked the platform; "" without
    such a flag."""
    compilation = vllm_config.compilation_config
    mode, splitting = compilation.cudagraph_mode, compilation.splitting_ops
    if compilation.mode != CompilationMode.VLLM_COMPILE or mode is None:
        return ""
    if compilation.pass_config.fuse_attn_quant and not compilation.use_inductor_graph_partition:
        return "fuse_attn_quant" if splitting is None and mode.has_piecewise_cudagraphs() else ""
    return "splitting_ops []" if splitting == [] and mode == CUDAGraphMode.FULL_AND_PIECEWISE else ""
