"""Pins the names of vLLM that only a GPU reaches. What cannot be imported without CUDA or Triton is read as source."""

from __future__ import annotations

import ast
from pathlib import Path

import vllm
from engine_signatures import assignments, calls, defined, holds, in_order, parameters, returned
from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends import registry
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.workspace import WorkspaceManager

from eagle_plugin.vllm import unsupported
from eagle_plugin.vllm.backend import TreeAttentionBackend
from eagle_plugin.vllm.drafter import TreeProposer
from eagle_plugin.vllm.prompt_attention import MOST_KEYS, PAGE, flash_kernel, triton_kernel
from eagle_plugin.vllm.worker import TreeWorker

FOLDER = Path(vllm.__file__).parent
CUDA = FOLDER / "platforms/cuda.py"
V2 = FOLDER / "v1/worker/gpu"


def test_the_platform_chooses_the_worker_that_ours_replaces() -> None:
    """In a base of the platform's class, which a hook has to find."""
    chooses = defined(CUDA, "CudaPlatformBase.check_and_update_config")
    assert parameters(chooses) == ["cls", "vllm_config"]
    assert assignments(chooses, "parallel_config.worker_cls") == [repr(unsupported.ENGINE_WORKERS["cuda"])]
    assert unsupported.ENGINE_WORKERS["cuda"] == f"{Worker.__module__}.{Worker.__qualname__}"
    assert unsupported.WORKERS["cuda"] == f"{TreeWorker.__module__}.{TreeWorker.__qualname__}"
    names = [node.name for node in defined(CUDA, "NvmlCudaPlatform").body if hasattr(node, "name")]
    assert "check_and_update_config" not in names and "get_device_capability" in names


def test_the_worker_asks_for_its_runner() -> None:
    assert parameters(Worker._make_model_runner) == parameters(TreeWorker._make_model_runner) == ["self"]
    assert calls(Worker._init_workspace_and_model_runner, "self._make_model_runner") == ["self._make_model_runner()"]
    assert in_order(Worker.init_device, ["self.device", "self._init_workspace_and_model_runner()"])
    assert "GPUModelRunnerV1(self.vllm_config, self.device)" in returned(Worker._make_model_runner)
    assert assignments(Worker.__init__, "self.use_v2_model_runner") == ["vllm_config.use_v2_model_runner"]


def test_a_configuration_can_ask_for_our_backend_by_name() -> None:
    enum = registry.AttentionBackendEnum[TreeAttentionBackend.get_name()]
    assert enum.value is None  # it is for backends of others
    chosen = defined(CUDA, "CudaPlatformBase.get_attn_backend_cls")
    assert parameters(chosen)[:2] == ["cls", "selected_backend"]
    assert holds(chosen, "_get_attn_backend_class(selected_backend)")
    assert returned(chosen)[0] == "_backend_cls_path(backend_class)"
    assert returned(defined(CUDA, "_get_attn_backend_class")) == ["backend.get_class()"]
    # Both models have a setting of their own.
    assert {"backend", "backend_per_kind"} <= AttentionConfig.__dataclass_fields__.keys()
    assert "attention_backend" in SpeculativeConfig.__dataclass_fields__
    assert holds(SpecDecodeBaseProposer._create_draft_vllm_config, "spec_cfg.attention_backend")


def test_flash_attention_takes_what_prompts_give_it() -> None:
    """Keys and values by their strides, as vLLM's own backend gives them: views of one cache."""
    flash = defined(FOLDER / "vllm_flash_attn/flash_attn_interface.py", "flash_attn_varlen_func")
    (call,) = calls(flash_kernel, "flash_attention")
    given = {
        keyword.arg for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call) for keyword in node.keywords
    }
    assert {"fa_version", *given} <= set(parameters(flash)) and len(given) == 14
    assert returned(flash) == ["(out, softmax_lse) if return_softmax_lse else out"]
    backend = FOLDER / "v1/attention/backends/flash_attn.py"
    forward = defined(backend, "FlashAttentionImpl.forward")
    assert holds(forward, "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)")
    sizes = defined(backend, "FlashAttentionBackend.get_supported_kernel_block_sizes")
    assert returned(sizes)[-1] == f"[MultipleOf({PAGE})]"
    # The window counts keys before the query, as ours does.
    made = defined(backend, "FlashAttentionImpl.__init__")
    assert "(sliding_window - 1, 0)" in assignments(made, "self.sliding_window")
    version = defined(FOLDER / "v1/attention/backends/fa_utils.py", "get_flash_attn_version")
    assert {"head_size", "has_sinks", "requires_softcap"} <= set(parameters(version))
    assert {"2", "3", "4"} <= set(assignments(version, "fa_version"))


def test_the_triton_kernel_takes_what_prompts_give_it() -> None:
    file = FOLDER / "v1/attention/ops/triton_unified_attention.py"
    unified = defined(file, "unified_attention")
    (call,) = calls(triton_kernel, "unified_attention")
    given = {
        keyword.arg for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call) for keyword in node.keywords
    }
    assert given <= set(parameters(unified)) and len(given) == 19
    # Strides of blocks, tokens and heads; a window counts the query itself; a chunk is a window with lookback 0.
    for name in ("k", "v"):
        assert all(holds(unified, f"{name}.stride({i})") for i in range(4))
    assert assignments(unified, "sliding_window_val") == ["1 + window_size[0] if window_size[0] >= 0 else 0"]
    assert "sliding_window_val // (chunk_lookback + 1)" in assignments(unified, "chunk_size")
    # So many keys are looked up in the block table at once, at most.
    sizes = [*assignments(unified, "TILE_SIZE_PREFILL"), *returned(defined(file, "_get_tile_size"))]
    assert max(int(size) for size in sizes if size.isdigit()) == MOST_KEYS


def test_graphs_leave_attention_out() -> None:
    """Then the rows are padded around attention, and what the builders get is not."""
    assert parameters(AttentionMetadataBuilder.get_cudagraph_support) == ["vllm_config", "kv_cache_spec"]
    resolve = CompilationConfig.resolve_cudagraph_mode_and_sizes
    assert holds(resolve, "min_cg_support == AttentionCGSupport.NEVER")
    assert {"CUDAGraphMode.PIECEWISE", "CUDAGraphMode.NONE"} <= set(assignments(resolve, "cudagraph_mode"))
    assert assignments(GPUModelRunner.execute_model, "pad_attn") == ["cudagraph_mode == CUDAGraphMode.FULL"]
    (slots,) = calls(GPUModelRunner.execute_model, "self._get_slot_mappings")
    assert "num_tokens_padded if pad_attn or has_separate_kv_update else num_tokens_unpadded" in slots
    # The graphs of the engine's own drafting.
    keys = SpecDecodeBaseProposer.initialize_cudagraph_keys
    assert parameters(keys) == parameters(TreeProposer.initialize_cudagraph_keys) == ["self", "cudagraph_mode"]


def test_configurations_have_what_is_refused_on_a_gpu() -> None:
    assert isinstance(ParallelConfig.use_ubatching, property) and isinstance(ModelConfig.rswa_window, property)
    assert {
        "enable_sleep_mode",
        "return_sampling_mask",
        "enable_trace_replay",
    } <= ModelConfig.__dataclass_fields__.keys()
    assert {"watermark_config", "aux_output_config"} <= VllmConfig.__dataclass_fields__.keys()
    assert "hisparse_config" in AttentionConfig.__dataclass_fields__
    read = {"VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"}
    assert read <= vllm.envs.environment_variables.keys()


def test_the_workspace_is_locked_before_our_captures() -> None:
    """workspace.py: the lock forbids new resources, which have the stream in their key, and larger scratch."""
    assert holds(GPUModelRunner.capture_model, "lock_workspace()")
    assert holds(defined(V2 / "model_runner.py", "GPUModelRunner.capture_model"), "lock_workspace()")
    (asked,) = calls(WorkspaceManager.get_persistent, "self.get_persistent_resource")
    assert asked.startswith("self.get_persistent_resource((torch.Tensor, key), ")
    for method in (WorkspaceManager.get_persistent_resource, WorkspaceManager._ensure_workspace_size):
        assert holds(method, "self._locked")
    assert assignments(WorkspaceManager.unlock, "self._locked") == ["False"]
    marlin = defined(FOLDER / "model_executor/layers/quantization/utils/marlin_utils.py", "get_marlin_workspace")
    assert holds(marlin, '("marlin_locks", current_stream())')


def test_what_a_graph_with_adapters_keeps_of_its_capture() -> None:
    """target_adapters.py: two numbers that the host reads; the rest of a step is written in place, on the device."""
    kernels = FOLDER / "lora/ops/triton_ops"
    for name in ("shrink", "expand"):
        launch = defined(kernels / f"lora_{name}_op.py", f"_lora_{name}")
        read = {ast.unparse(node) for node in ast.walk(launch) if ast.unparse(node).endswith(".item()")}
        assert read - {node for node in read if "\n" in node} == {"no_lora_flag_cpu.item()", "num_active_loras.item()"}
    made = PunicaWrapperGPU.update_metadata
    assert calls(made, "self.token_mapping_meta.prepare_tensors") == [
        "self.token_mapping_meta.prepare_tensors(self.token_lora_indices)"
    ]
    prepare = defined(kernels / "lora_kernel_metadata.py", "LoRAKernelMeta.prepare_tensors")
    written = {"token_indices_sorted_by_lora_ids", "active_lora_ids", "num_tokens_per_lora", "lora_token_start_loc"}
    copies = [ast.unparse(node.func) for node in ast.walk(prepare) if isinstance(node, ast.Call)]
    assert all(any(copy.startswith(f"self.{name}[") and copy.endswith("copy_") for copy in copies) for name in written)
    assert "self.active_lora_ids.fill_(-1)" in ast.unparse(
        defined(kernels / "lora_kernel_metadata.py", "LoRAKernelMeta")
    )
    assert "cudagraph_specialize_lora" in CompilationConfig.__dataclass_fields__
    assert "VLLM_LORA_ENABLE_DUAL_STREAM" in vllm.envs.environment_variables
