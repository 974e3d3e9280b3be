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


def keep_attention_out(vllm_config: Any) -> list[str]:
    """Take from this ``VllmConfig`` what would put attention into vLLM's own graphs, or into its compiled code, where
    ours cannot be; returns what it was, empty without such.

    Of such flags vLLM makes the mode FULL after it has asked the platform, and would end the start with it where the
    caches are made. FULL_DECODE_ONLY becomes PIECEWISE there, or NONE where models are not compiled.
    """
    compilation, taken = vllm_config.compilation_config, []
    mode, is_full = compilation.cudagraph_mode, (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)
    if compilation.mode == CompilationMode.VLLM_COMPILE:
        if compilation.pass_config.fuse_attn_quant and not compilation.use_inductor_graph_partition:
            compilation.pass_config.fuse_attn_quant = False
            taken.append("fuse_attn_quant")
        if compilation.splitting_ops == [] and mode in is_full:
            compilation.splitting_ops = None
            taken.append("splitting_ops []")
    if mode == CUDAGraphMode.FULL:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        taken.append("cudagraph_mode FULL")
    return taken
