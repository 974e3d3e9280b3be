"""Pins what vLLM does where drafting, sampling and metrics touch it; the names are in one table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_signatures import assignments, calls, fields, holds, in_order, parameters, returned
from family_models import VOCAB
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics import loggers
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import sampler
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors, builtin
from vllm.v1.sample.ops import penalties
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats
from vllm.v1.worker.gpu_input_batch import InputBatch

from eagle_plugin.vllm import sampling
from eagle_plugin.vllm.drafter import TreeProposer
from eagle_plugin.vllm.metrics import TreeMetrics

# ---------------------------------------------------------------------------------------------------------------------
# The drafter and the sampler


def test_the_proposer() -> None:
    assert issubclass(TreeProposer, EagleProposer)
    assert parameters(LogitsProcessor.forward)[1:3] == ["lm_head", "hidden_states"]


def test_linear_layers_are_dispatched_after_loading() -> None:
    """draft_weights.py: layers look the function up when they are loaded, and call what it left by position."""
    for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        load = method.process_weights_after_loading
        assert holds(load, "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm")
        assert calls(load, "dispatch_cpu_unquantized_gemm")
    assert calls(layers.cpu_unquantized_gemm, "cpu_linear") == ["layer.cpu_linear(x, weight, bias)"]
    assert issubclass(vocab_parallel_embedding.ParallelLMHead, vocab_parallel_embedding.VocabParallelEmbedding)


def test_the_least_temperature_that_samples() -> None:
    assert sampler._SAMPLING_EPS == sampling.GREEDY_BELOW


def test_a_batch_that_changes_gets_new_metadata() -> None:
    """`RequestDraws` keeps the parameters and keys of a batch as long as vLLM keeps its metadata."""
    made = "if batch_update:\n    self.sampling_metadata = self._make_sampling_metadata()"
    assert holds(InputBatch.refresh_metadata, made)
    assert [x.split("(")[0] for x in returned(InputBatch._make_sampling_metadata)] == ["SamplingMetadata"]
    draws, first = request_draws(), metadata_of({})
    found = draws.of(first, ["a", "b"])
    assert all(x is y for x, y in zip(found, draws.of(first, ["a", "b"]), strict=True))
    assert draws.of(metadata_of({}), ["a", "b"])[0] is not found[0]


def request_draws(seed: int = 3, engine: int = 0) -> sampling.RequestDraws:
    return sampling.RequestDraws(VOCAB, torch.device("cpu"), seed, engine)


def metadata_of(seeds: dict[int, int], **changes: Any) -> Any:
    """What `RequestDraws` reads of vLLM's metadata, for requests at temperature 1."""
    generators = {i: torch.Generator().manual_seed(seed) for i, seed in seeds.items()}
    processors = SimpleNamespace(argmax_invariant=[])
    names = {"temperature", "top_k", "top_p"}
    given = dict.fromkeys(names) | {"temperature": torch.ones(8)} | changes
    return SimpleNamespace(generators=generators, logitsprocs=processors, **{"all_greedy": False} | given)


def test_a_request_keeps_its_key() -> None:
    """In every batch, in any place of it, and while it waits; to its end."""
    draws = request_draws()
    a, b = draws.of(metadata_of({}), ["a", "b"])[1].tolist()
    assert a != b
    seeded, again = draws.of(metadata_of({0: 42}), ["s", "a"])[1].tolist()
    assert again == a and seeded == 42
    assert draws.of(metadata_of({1: 42}), ["b", "s"])[1].tolist() == [b, 42]
    draws.forget(["a", "unknown"])
    assert draws.of(metadata_of({}), ["a", "b"])[1].tolist()[1] == b
    assert draws.of(metadata_of({}), ["a"])[1].tolist() != [a]


def test_ranks_draw_the_same_keys_and_servers_of_other_seeds_do_not() -> None:
    """Nor do the engines of one server, which have one seed."""
    places = ((3, 0), (3, 0), (4, 0), (3, 1), (3, 2))
    one, other, *others = (request_draws(*place).of(metadata_of({}), ["a", "b"])[1].tolist() for place in places)
    assert one == other and len({*one, *(key for keys in others for key in keys)}) == 8


def test_greedy_requests_have_no_keys() -> None:
    params, keys = request_draws().of(metadata_of({}, temperature=None, all_greedy=True), ["a"])
    assert keys is None and params.is_greedy().all()


def test_the_functions_of_the_sampler() -> None:
    assert fields(SamplerOutput) == {"sampled_token_ids", "logprobs_tensors"}
    assert LogprobsTensors._fields[:3] == ("logprob_token_ids", "logprobs", "selected_token_ranks")
    assert returned(penalties.apply_all_penalties)[0].startswith("apply_penalties(logits, prompt_token_ids, ")


def test_the_engines_order_of_transforms_is_ours() -> None:
    """The steps of plain decoding in the order of logits.transform_logits; temperature and filters follow."""
    held = "sampling_metadata.{}".format
    masked = f"logits.masked_fill_({held('allowed_token_ids_mask')}, float('-inf'))"
    steps = [masked, "apply_bad_words", held("logitsprocs.non_argmax_invariant"), "self.apply_penalties"]
    assert in_order(sampler.Sampler.apply_logits_processors, [*steps, "holder.apply_to_logits"])
    steps = ["self.apply_temperature", held("logitsprocs.argmax_invariant"), "self.topk_topp_sampler"]
    assert in_order(sampler.Sampler.sample, steps)


def test_logits_processors_keep_what_we_read() -> None:
    assert list(BUILTIN_LOGITS_PROCESSORS) == [
        builtin.MinTokensLogitsProcessor, builtin.LogitBiasLogitsProcessor, builtin.MinPLogitsProcessor,
    ]  # fmt: skip
    config = type("Config", (), {"scheduler_config": type("Scheduler", (), {"max_num_seqs": 4})})
    least, bias, least_p = (processor(config, torch.device("cpu"), False) for processor in BUILTIN_LOGITS_PROCESSORS)
    assert bias.biases == {} and least_p.min_p_count == 0
    assert isinstance(least_p.min_p, torch.Tensor)
    processors = LogitsProcessors([least, bias, least_p])
    assert processors.non_argmax_invariant == [least, bias] and processors.argmax_invariant == [least_p]
    asking = SamplingParams(min_p=0.2, logit_bias={3: 1.5}, min_tokens=2, stop_token_ids=[7])
    assert asking.min_tokens == 2 and asking.all_stop_token_ids == {7}
    for processor in (least, bias, least_p):
        processor.update_state(BatchUpdate(batch_size=1, added=[(0, asking, None, [])], removed=[], moved=[]))
    assert bias.biases == {0: {3: 1.5}}
    assert least_p.min_p_count == 1 and least_p.min_p.tolist() == [[pytest.approx(0.2)]]


def test_the_holder_of_thinking_budgets() -> None:
    holder = ThinkingBudgetStateHolder(None, 4, 0, torch.device("cpu"), False)
    assert holder._state == {} and not holder.has_tracked_requests() and not holder.in_spec_mode
    assert parameters(holder.update_state)[:2] == ["output_token_ids", "spec_token_ids"]
    assert parameters(holder._update_think_state) == ["state"]
    update = ThinkingBudgetStateHolder.update_state
    assert holds(update, "self._update_think_state(state)")
    assert all(assignments(update, f"state['{key}']") for key in ("output_tok_ids", "spec_token_ids", "force_index"))
    assert assignments(update, "state['in_spec_mode']") == ["self.in_spec_mode"]
    started = holder._init_state_entry([1], 5)
    assert {"in_end", "start_thinking", "check_count_down", "thinking_token_budget"} <= started.keys()
    assert parameters(holder.apply_to_logits) == ["logits", "predict_bonus_token", "spec_token_ids"]


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def test_the_logger_names_the_class_that_counts_drafts() -> None:
    assert calls(loggers.PrometheusStatLogger.__init__, "_spec_decoding_cls") and issubclass(
        loggers.PrometheusStatLogger._spec_decoding_cls, SpecDecodingProm
    )
    assert parameters(TreeMetrics.__init__) == parameters(SpecDecodingProm.__init__)
    assert parameters(TreeMetrics.observe) == parameters(SpecDecodingProm.observe)
    stats = SpecDecodingStats.new(3)
    stats.observe_draft(num_draft_tokens=3, num_accepted_tokens=2)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens_per_pos) == (1, 3, [1, 1, 0])
