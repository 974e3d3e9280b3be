"""Imports what engines of vLLM's tests need sooner or later, so that forks of the process have it.

Small functions that vLLM compiles by torch.compile where it first calls them, once per process and for seconds each,
stay as they are written: what they compute is vLLM's own. Models are compiled where a test asks for it.
"""

from __future__ import annotations

import importlib
import os

MODULES = (
    *("pytest", "safetensors.torch", "prometheus_client", "transformers.models.llama.modeling_llama"),
    *("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.llama_eagle3", "vllm.compilation.backends"),
    *("vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers.quantization.compressed_tensors.utils"),
    *("vllm.v1.core.sched.async_scheduler", "vllm.distributed.elastic_ep.elastic_execute"),
    *("eagle_plugin.vllm.plugin", "eagle_plugin.vllm.cpu_worker", "eagle_plugin.vllm.support"),
)

os.environ["TORCHDYNAMO_DISABLE"] = "1"
for _name in MODULES:
    importlib.import_module(_name)
del os.environ["TORCHDYNAMO_DISABLE"]
import torch._dynamo.config  # noqa: E402

torch._dynamo.config.disable = False  # which torch has read from the environment
