"""Pins what vLLM's V2 model runner does around the methods that ours replaces; names are in `v2_contract.py`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import vllm
from engine_signatures import assignments, calls, defined, holds, parameters
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from eagle_plugin.vllm.tree_steps import TreeSteps
from eagle_plugin.vllm.v2_runner import V2TreeModelRunner
from eagle_plugin.vllm.v2_speculator import TreeSpeculator

V2 = Path(vllm.__file__).parent / "v1/worker/gpu"
STEP, SAMPLE = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens


@pytest.mark.parametrize("name", ["prepare_attn", "sample", "sample_tokens", "finish_requests", "take_draft_token_ids"])
def test_overridden_methods_agree(name: str) -> None:
    assert parameters(getattr(V2TreeModelRunner, name)) == parameters(getattr(GPUModelRunner, name))
    assert V2TreeModelRunner.__mro__[1:3] == (TreeSteps, GPUModelRunner)


def test_the_speculator_is_called_as_ours_is() -> None:
    assert parameters(TreeSpeculator.propose) == parameters(DraftModelSpeculator.propose)


def test_a_step_calls_what_we_override() -> None:
    """In this order: rows and slots of chains, our trees in their place, the metadata, the target."""
    places = ["self.finish_requests(scheduler_output)", "self.prepare_attn(input_batch)"]
    assert [calls(STEP, place.partition("(")[0]) for place in places] == [[place] for place in places]
    assert len(calls(STEP, "self.prepare_inputs")) == len(calls(STEP, "self.model_state.prepare_attn")) == 1
    assert calls(STEP, "self.model") == ["self.model(**model_inputs)"]
    assert calls(SAMPLE, "self.sample") == ["self.sample(hidden_states, input_batch, grammar_output)"]
    assert len(calls(SAMPLE, "self.postprocess_sampled")) == len(calls(SAMPLE, "self.speculator.propose")) == 1
    assert len(calls(SAMPLE, "self.draft_tokens_handler.set_draft_tokens")) == 1
    # What it drafted is overwritten past the drafts of the step.
    assert assignments(SAMPLE, "draft_tokens[:, num_spec_tokens:]") == ["-1"]


def test_embeddings_and_positions_of_several_axes_are_made_after_our_rows() -> None:
    step = inspect.getsource(STEP)
    made = ("self.prepare_attn(", "self.model_state.prepare_inputs_embeds(", "self.model_state.prepare_inputs(")
    assert sorted(made, key=step.index) == list(made)


def test_adapters_are_named_after_our_rows_and_once_per_request() -> None:
    """Of the logits: with drafts a request has several rows of them, which `_set_active_loras` of ours says."""
    assert calls(STEP, "self._set_active_loras") == ["self._set_active_loras(*lora_inputs)"]
    step = inspect.getsource(STEP)
    assert step.index("self.prepare_attn(") < step.index("self._set_active_loras(") < step.index("self.model(**")
    inputs = defined(V2 / "lora_utils.py", "LoraState.make_lora_inputs")
    assert assignments(inputs, "prompt_lora_mapping") == ["tuple(lora_ids)"]


def test_what_was_accepted_counts_as_of_a_chain() -> None:
    """A request of W rows that accepted n of them moves on by W - (W - n) tokens."""
    update = defined(V2 / "input_batch.py", "_post_update_kernel")
    assert assignments(update, "computed_delta") == ["query_len - num_rejected"]
    rejected = defined(V2 / "input_batch.py", "_get_num_sampled_and_rejected_kernel")
    assert "num_logits - num_sampled" in assignments(rejected, "num_rejected")
    assert holds(rejected, "is_chunked_prefilling")


def test_what_is_missing_in_the_v2_runner() -> None:
    """docs/upstream.md has what vLLM could do for trees; ours does without."""
    assert calls(defined(V2 / "model_runner.py", "GPUModelRunner.__init__"), "init_speculator")
    assert not holds(defined(V2 / "spec_decode/__init__.py"), "resolve_obj_by_qualname")  # nor any registry
    # The rows of a request are a chain: the tokens before a row are those of the rows before it.
    penalties = defined(V2 / "sample/penalties.py", "_penalties_kernel")
    assert assignments(penalties, "start_idx") == ["token_idx - pos"]
    assert holds(penalties, "tl.load(token_ids_ptr + start_idx + prev_pos + 1)")
