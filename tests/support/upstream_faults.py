"""The faults of the stock engines that docs/upstream.md describes: their names, and the source lines that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine_sources import find_package

ENGINES = ("vllm", "sglang")


class Line(NamedTuple):
    """A line of an engine's source: its file below site-packages, its number from 1, and a text that it contains."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Fault:
    """One fault; its name begins with that of the engine, and the command that shows it takes the name."""

    name: str
    summary: str
    lines: tuple[Line, ...]

    @property
    def engine(self) -> str:
        return self.name.partition("-")[0]

    @property
    def command(self) -> str:
        return f"python tests/support/upstream.py {self.name}"


FAULTS = (
    Fault(
        "vllm-sampler",
        "drafts above temperature 0 on a CPU are sampled with uninitialised temperatures",
        (Line("vllm/utils/cpu_triton_utils.py", 399, "_ensure_int64(output),"),),
    ),
    Fault(
        "vllm-seed-chunks",
        "a seeded request whose prompt is read in parts ends the engine on a CPU",
        (Line("vllm/v1/worker/gpu_model_runner.py", 3502, "gen.set_offset(gen.get_offset() - 4)"),),
    ),
    Fault(
        "vllm-min-tokens",
        "stop tokens are allowed before min_tokens with drafts and asynchronous scheduling",
        (
            Line("vllm/v1/sample/logits_processor/builtin.py", 217, "if len(out_tok_ids) >= min_toks"),
            Line("vllm/v1/worker/gpu_model_runner.py", 1360, "extend([-1] * optimistic_num_accepted)"),
            Line("vllm/platforms/cpu.py", 331, "scheduler_config.async_scheduling = False"),
        ),
    ),
    Fault(
        "vllm-thinking-budget",
        "a request without a thinking budget inherits that of a finished request",
        (Line("vllm/v1/sample/thinking_budget_state.py", 110, "state = self._state.pop(i1, None)"),),
    ),
    Fault(
        "vllm-lora-mixed",
        "requests without an adapter get the adapter of their batch on a CPU",
        (
            Line("vllm/lora/ops/torch_ops/lora_ops.py", 31, "lora_b_weights[lora_indices_tensor]"),
            Line("vllm/lora/ops/torch_ops/lora_ops.py", 74, "lora_b_weights[lora_indices_tensor]"),
            Line("vllm/lora/ops/torch_ops/lora_ops.py", 119, "lora_b_weights[lora_indices_tensor]"),
        ),
    ),
    Fault(
        "vllm-chunk-ends",
        "at the end of a part of a prompt the head reads the prompt's last token in place of the next one",
        (
            Line(
                "vllm/v1/spec_decode/llm_base_proposer.py",
                1067,
                "get_token_id(gpu_input_batch.num_tokens_no_spec[i] - 1)",
            ),
            Line("vllm/v1/worker/gpu_input_batch.py", 385, "self.num_tokens_no_spec[req_index] = request.num_tokens"),
            Line("vllm/v1/spec_decode/llm_base_proposer.py", 1042, "next_token_id = req_state.get_token_id(seq_len)"),
        ),
    ),
    Fault(
        "vllm-states-cache",
        "drafts for a target with linear layers end the engine on a CPU, where prefix caching is on",
        (Line("vllm/v1/worker/mamba_utils.py", 1177, "postprocess_mamba_fused_kernel[grid]("),),
    ),
    Fault(
        "vllm-compile-cache",
        "the key of the compile cache knows neither the worker nor the class of an attention backend",
        (
            Line("vllm/config/parallel.py", 923, '"worker_cls",'),
            Line("vllm/config/speculative.py", 637, "factors.append(self.draft_model_config.compute_hash())"),
            Line("vllm/model_executor/layers/attention/attention.py", 563, "forward_includes_kv_cache_update"),
            Line("vllm/compilation/caching.py", 581, "config_hash = vllm_config.compute_hash()"),
            Line("vllm/compilation/backends.py", 1041, "config_hash = vllm_config.compute_hash()"),
        ),
    ),
    Fault(
        "vllm-latent-rotation",
        "plain text of a target with latent attention depends on the batch on a CPU, where it has no YaRN",
        (
            Line("vllm/model_executor/layers/mla.py", 228, "k_pe = self.rotary_emb("),
            Line("vllm/model_executor/layers/rotary_embedding/base.py", 310, "ops.rotary_embedding("),
        ),
    ),
    Fault(
        "vllm-latent-blocks",
        "an EAGLE head beside a target with latent attention does not start on a CPU",
        (
            Line("vllm/v1/attention/backends/mla/cpu_mla.py", 68, "return [16]"),
            Line("vllm/v1/attention/backends/cpu_attn.py", 66, "return [MultipleOf(32)]"),
        ),
    ),
    Fault(
        "vllm-context-norms",
        "a DFlash drafter norms the context's keys of all layers by the weights of the first on a CPU",
        (Line("vllm/model_executor/models/qwen3_dflash.py", 643, "ops.rms_norm("),),
    ),
    Fault(
        "sglang-token-id",
        "a token id outside of the vocabulary ends the server",
        (
            Line("sglang/srt/layers/vocab_parallel_embedding.py", 481, "self.quant_method.embedding(self, input_"),
            Line("sglang/srt/utils/async_probe.py", 190, "if not envs.SGLANG_ENABLE_ASYNC_ASSERT.get():"),
        ),
    ),
    Fault(
        "sglang-weight-update",
        "an update of weights from disk ends a server with a draft head",
        (
            Line("sglang/srt/managers/scheduler_components/weight_updater.py", 143, "in self._select_runners():"),
            Line("sglang/srt/model_executor/model_runner_components/weight_updater.py", 237, "model_load_weights("),
        ),
    ),
    Fault(
        "sglang-penalties-late",
        "plain decoding counts a token for penalties one round late, and the last token of the prompt once",
        (Line("sglang/srt/managers/schedule_batch.py", 3721, "else req.origin_input_ids[-1]"),),
    ),
    Fault(
        "sglang-penalties-drafts",
        "with drafts one token per round is counted for penalties",
        (Line("sglang/srt/speculative/eagle_utils.py", 861, "relaxed version of penalties"),),
    ),
    Fault(
        "sglang-greedy-cpu",
        "drafts on a CPU are verified greedily at every temperature",
        (Line("sglang/srt/speculative/eagle_utils.py", 500, "return is_all_greedy or is_cpu or is_xpu"),),
    ),
    Fault(
        "sglang-context-end",
        "with drafts a request that comes to the context length ends the server, or writes over another's slots",
        (
            Line("sglang/srt/mem_cache/allocation_sizing.py", 105, "extra = 4 + (max_speculative_num_draft_tokens()"),
            Line("sglang/srt/mem_cache/allocation_sizing.py", 70, "return 2 * get_alloc_len_per_decode()"),
        ),
    ),
    Fault(
        "sglang-stops-drafts",
        "with drafts the stop that is listed first is taken, not the one that is complete first",
        (
            Line("sglang/srt/managers/schedule_batch.py", 1920, "for stop_str in self.sampling_params.stop_strs:"),
            Line("sglang/srt/managers/schedule_batch.py", 2026, "if self._check_str_based_finish(new_accepted_len):"),
            Line("sglang/srt/managers/schedule_batch.py", 2003, "self.finished_len > max_new_tokens:"),
        ),
    ),
    Fault(
        "sglang-logit-processor",
        "with drafts a custom logit processor sees the first token only",
        (Line("sglang/srt/speculative/eagle_utils.py", 521, "def eagle_sample("),),
    ),
    Fault(
        "sglang-lora-pinning",
        "a server with LoRA does not start on a machine without an accelerator",
        (
            Line("sglang/srt/lora/layers.py", 479, "pin_memory=True"),
            Line("sglang/srt/lora/backend/torch_backend.py", 237, "pin_memory=True"),
        ),
    ),
    Fault(
        "sglang-mtp-cpu",
        "a server that drafts by an MTP layer of its target does not start on a machine without a GPU",
        (
            Line("sglang/srt/models/qwen3_moe_mtp.py", 90, "torch.cuda.synchronize()"),
            Line("sglang/srt/models/qwen3_next.py", 1121, "torch.cuda.synchronize()"),
            Line("sglang/srt/models/glm4_moe.py", 1259, "torch.cuda.synchronize()"),
        ),
    ),
    Fault(
        "sglang-llama4-cpu",
        "Llama 4 does not run on a CPU without AMX",
        (
            Line("sglang/srt/models/llama4.py", 334, "q_out_unused, k_out_unused = self.rotary_emb("),
            Line("sglang/srt/models/llama4.py", 356, ".bfloat16()"),
            Line("sglang/srt/layers/moe/fused_moe_native.py", 68, "if moe_runner_config.apply_router_weight_on_input"),
            Line("sglang/srt/layers/attention/intel_amx_backend.py", 308, "layer.sliding_window_size + 1,"),
        ),
    ),
    Fault(
        "sglang-llama4-text",
        "of the class of Llama 4 text models no experts are loaded",
        (
            Line("sglang/srt/models/llama.py", 779, 'logger.warning(f"Parameter {name} not found in params_dict")'),
            Line("sglang/srt/models/mllama4.py", 606, "def permute_qk_weight_for_rotary("),
        ),
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def drift(line: Line, site_packages: Path) -> str | None:
    """Why a line of the installed engine is not the one that the document names; None where it is."""
    path = site_packages / line.file
    source = path.read_text(encoding="utf-8").splitlines() if path.is_file() else None
    if source is None:
        return f"{line.place}: the file is gone; run the command of the fault again, then correct docs/upstream.md"
    if line.number <= len(source) and line.text in source[line.number - 1]:
        return None
    found = [number for number, text in enumerate(source, 1) if line.text in text]
    where = f"it is in line {', '.join(map(str, found))}" if found else "it is gone"
    return f"{line.place}: {line.text!r} is not there, {where}; run the command of the fault again, then correct it"


def site_packages(engine: str) -> Path | None:
    """The folder that holds the installed engine, in this environment or the checkout's; None without one."""
    package = find_package(engine)
    return package and package.parent
