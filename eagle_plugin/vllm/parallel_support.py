"""What our worker does not serve of the ways to share a model among vLLM's ranks and engines."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

SERVED_EXCHANGE = "allgather_reducescatter"  # vLLM's default: the tokens of all engines in every rank
Check = tuple[bool, str]  # whether the configuration has something, and the sentence that says what


def unserved_ranks(vllm_config: Any) -> tuple[Check, ...]:
    """What holds of the ranks of a ``VllmConfig`` that our worker does not serve."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    name, device = model.architectures[0], vllm_config.device_config.device_type
    return (
        (parallel.nnodes > 1, "--nnodes: ranks on several machines are not served yet"),
        (parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size: it is not served yet"),
        (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size: pipeline parallelism is not served yet"),
        (parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size: it is not served yet"),
        (
            parallel.tensor_parallel_size > 1 and model.is_hybrid,
            f"--tensor-parallel-size: it is not served with target {name} yet",
        ),
        # The engines of a target without experts have nothing to do with each other.
        (
            parallel.data_parallel_size > 1 and model.is_moe and device == "cpu" and not engines_exchange_tokens(),
            f"--data-parallel-size: the experts of target {name} get tokens of all engines, which vLLM's communicator "
            "on a CPU does not exchange",
        ),
        (
            parallel.use_all2all and model.is_moe and parallel.all2all_backend != SERVED_EXCHANGE,
            f"--all2all-backend {parallel.all2all_backend}: only {SERVED_EXCHANGE} is served",
        ),
        (parallel.enable_eplb, "--enable-eplb: experts that move between ranks are not served yet"),
        (
            parallel.enable_expert_parallel and device == "cpu" and not experts_know_their_map(),
            "--enable-expert-parallel: vLLM's experts on a CPU do not know which of them a rank has, and read beyond "
            "their weights",
        ),
    )


def experts_know_their_map() -> bool:
    """Whether what computes vLLM's experts on a CPU reads the map from all experts to those of its rank.

    In the tested releases it does not: with --enable-expert-parallel a CPU ends with a segmentation fault.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    source = ast.parse(textwrap.dedent(inspect.getsource(CPUUnquantizedExperts.apply)))
    return any(isinstance(node, ast.Name) and node.id == "expert_map" for node in ast.walk(source))


def engines_exchange_tokens() -> bool:
    """Whether vLLM on a CPU can gather the tokens of all engines for a layer of experts.

    In the tested releases it cannot: such a server ends with a NotImplementedError at its first forward.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return "all_gatherv" in vars(CpuCommunicator)
