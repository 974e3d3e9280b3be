"""Pins what vLLM does where the adapter touches it, so that the next release fails here first.

Names, fields and parameters are in one table, `eagle_plugin/vllm/engine_contract.py`, from which
tests/engines/test_engine_contract.py is generated. Here is what a table cannot say; test_contract_runner.py has what
the model runner and attention do.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from engine_signatures import assignments, calls, fields, holds, parameters, returned
from vllm.config import (
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from eagle_plugin.vllm import plugin, unsupported, version
from eagle_plugin.vllm.cpu_worker import TreeCPUWorker

# ---------------------------------------------------------------------------------------------------------------------
# The plugin and what it supports


def test_version_is_a_tested_one() -> None:
    assert version.installed().partition("+")[0] in version.TESTED


def test_hooked_methods() -> None:
    assert isinstance(CpuPlatform.__dict__["check_and_update_config"], classmethod)
    original = CpuPlatform.__dict__["check_and_update_config"].__func__
    assert parameters(getattr(original, plugin._MARK, original)) == ["cls", "vllm_config"]
    check = SamplingParams._validate_spec_decode
    assert parameters(getattr(check, plugin._MARK, check)) == ["self", "speculative_config"]
    chosen = SchedulerConfig.get_scheduler_cls
    assert parameters(getattr(chosen, plugin._MARK, chosen)) == ["self"]
    made = EngineArgs.create_speculative_config
    assert parameters(getattr(made, plugin._MARK, made))[0] == "self"
    assert EngineArgs.__module__ == "vllm.engine.arg_utils"
    # The platform has the last word on the worker; what is decided there holds for the whole engine.
    assert calls(VllmConfig.__post_init__, "check_and_update_config") == [
        "current_platform.check_and_update_config(self)"
    ]


def test_what_support_reads_is_computed() -> None:
    computed = {"architectures", "use_mla", "is_hybrid", "is_attention_free", "uses_mrope", "is_multimodal_model"}
    assert all(isinstance(getattr(ModelConfig, name), property) for name in computed)
    assert isinstance(ModelConfig.is_encoder_decoder, cached_property)
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    defaults = {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}
    assert defaults["rejection_sample_method"] == "standard"


def test_rounds_are_read_where_they_are_watched() -> None:
    """metrics.py: the scheduler hands the counts of every verified round over by name, statistics or not."""
    counted = Scheduler.make_spec_decoding_stats
    names = {"num_draft_tokens", "num_accepted_tokens", "request_id"}
    assert names < set(parameters(getattr(counted, plugin._MARK, counted)))
    (call,) = calls(Scheduler.update_from_output, "make_spec_decoding_stats")
    assert all(f"{name}=" in call for name in names) and "(spec_decoding_stats, " in call
    assert assignments(Scheduler.update_from_output, "num_accepted")
    assert "thinking_token_budget" in SamplingParams.__struct_fields__


def test_grammars_are_followed_where_trees_take_the_place_of_chains() -> None:
    """grammar.py: drafts arrive in two ways, are checked one by one, and the masks of a step are made together."""
    hooked: dict[Any, list[str]] = {
        Scheduler.update_draft_token_ids: ["self", "draft_token_ids"],
        Scheduler.update_draft_token_ids_in_output: ["self", "draft_token_ids", "scheduler_output"],
        StructuredOutputManager.validate_tokens: ["self", "request", "spec_tokens"],
        StructuredOutputManager.grammar_bitmask: [
            "self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens",
        ],
    }  # fmt: skip
    originals = [getattr(method, plugin._MARK, method) for method in hooked]
    assert [parameters(method) for method in originals] == list(hooked.values())
    assert all(len(calls(method, "structured_output_manager.validate_tokens")) == 1 for method in originals[:2])
    masks = originals[3]
    (rows,) = calls(masks, "self.backend.allocate_token_bitmask")
    assert "max_batch_size * (1 + max_num_spec_tokens)" in rows
    assert assignments(masks, "self._grammar_bitmask")
    assert returned(masks)[-1] == "bitmask_tensor.numpy()"
    assert {"accept_tokens", "rollback", "is_terminated", "fill_bitmask"} <= vars(StructuredOutputGrammar).keys()
    assert fields(DraftTokenIds) == {"req_ids", "draft_token_ids"}
    # Without a reasoning parser the grammar holds from the first token on.
    assert holds(StructuredOutputManager.__init__, "reasoning_parser")
    assert holds(StructuredOutputManager._get_reasoner, "self.reasoner_cls is None")


def test_agreement_uses_the_group_of_tensor_parallelism() -> None:
    """ranks.py of both folders: the group of tensor parallelism, as SGLang's."""
    assert parameters(GroupCoordinator.broadcast)[1:] == ["input_", "src"]
    assert get_tp_group.__module__ == "vllm.distributed.parallel_state"


def test_the_worker_makes_the_runner_by_its_modules_name() -> None:
    assert f"{cpu_worker.CPUWorker.__module__}.{cpu_worker.CPUWorker.__qualname__}" == unsupported.ENGINE_WORKERS["cpu"]
    assert repr(unsupported.ENGINE_WORKERS["cpu"]) in assignments(CpuPlatform, "parallel_config.worker_cls")
    assert f"{TreeCPUWorker.__module__}.{TreeCPUWorker.__qualname__}" == unsupported.WORKERS["cpu"]
    assert cpu_worker.CPUModelRunner is CPUModelRunner
    assert calls(cpu_worker.CPUWorker.init_device, "CPUModelRunner") == [
        "CPUModelRunner(self.vllm_config, torch.device('cpu'))"
    ]
