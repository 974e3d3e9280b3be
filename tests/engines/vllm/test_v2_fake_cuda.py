"""A step of our V2 model runner on fake CUDA tensors: what the host waits for or reads from the device is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm_fake_cuda import BATCHES, HIDDEN, NAMES, SHAPE, VOCABULARY, B, Head, caches, table

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm import v2_runner, v2_sampling
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.attention import TreeMetadata
from eagle_plugin.vllm.batch import DraftStore, root_drafts
from eagle_plugin.vllm.deferred_extend import DeferredTokens
from eagle_plugin.vllm.request_fields import AskedSources
from eagle_plugin.vllm.shapes import RoundShapes
from eagle_plugin.vllm.v2_runner import V2TreeModelRunner
from eagle_plugin.vllm.v2_speculator import TreeSpeculator
from eagle_plugin.vllm.verifier import TreeVerifier


def staged(values: Any) -> SimpleNamespace:
    """As vLLM keeps a number of each request: on the host, and where the device reads it."""
    on_host = np.asarray(values)
    return SimpleNamespace(np=on_host, gpu=torch.from_numpy(on_host).to(CUDA))


def sampler(greedy: bool, penalised: bool) -> Any:
    bias, penalties = LogitBiasState.__new__(LogitBiasState), PenaltiesState.__new__(PenaltiesState)
    bias.use_logit_bias = np.zeros(B, dtype=bool)
    ones = staged(np.ones(B, dtype=np.float32))
    vars(penalties).update(
        use_penalty=np.array([penalised, False, penalised]),
        repetition_penalty=ones,
        frequency_penalty=ones,
        presence_penalty=ones,
        output_bin_counts=torch.zeros(B, VOCABULARY, dtype=torch.int32, device=CUDA),
        prompt_bin_mask=torch.zeros(B, VOCABULARY // 32, dtype=torch.int32, device=CUDA),
    )
    bias.apply = lambda logits, context: logits  # type: ignore[method-assign]
    states = SimpleNamespace(
        temperature=staged(np.full(B, 0.0 if greedy else 0.7, dtype=np.float32)),
        top_k=staged(np.full(B, 7, dtype=np.int32)),
        top_p=ones,
        min_p=staged(np.zeros(B, dtype=np.float32)),
        seeds=staged(np.arange(B)),
    )
    return SimpleNamespace(
        sampling_states=states,
        logits_processors=[bias, penalties],
        thinking_budget_state=SimpleNamespace(enabled=False, apply=lambda *_: None),
        compute_nans=False,
        get_logprobs_dims=lambda *_: None,
    )


def input_batch(counts: list[int], lens: list[int]) -> Any:
    n, ends = sum(lens), np.cumsum([0, *(count + 1 for count in counts)])
    rows = np.concatenate([np.arange(end - count - 1, end) for end, count in zip(np.cumsum(lens), counts, strict=True)])
    owners = np.repeat(np.arange(B), np.diff(ends))
    nine = np.full(B, 9)
    return SimpleNamespace(
        req_ids=NAMES,
        idx_mapping=torch.arange(B, device=CUDA),
        idx_mapping_np=np.arange(B),
        expanded_idx_mapping=torch.from_numpy(owners).to(CUDA),
        expanded_local_pos=torch.zeros(len(rows), dtype=torch.int32, device=CUDA),
        num_tokens=n,
        num_scheduled_tokens=np.array(lens, dtype=np.int32),
        num_draft_tokens_per_req=np.array(counts, dtype=np.int32) if any(counts) else None,
        num_computed_tokens_np=nine,
        num_computed_prefill_tokens_np=nine,
        prefill_len_np=nine,
        seq_lens=torch.full((B,), 30, dtype=torch.int32, device=CUDA),
        seq_lens_cpu_upper_bound=SimpleNamespace(max=lambda: 9 + max(lens), numpy=lambda: nine + np.array(lens)),
        input_ids=torch.zeros(n, dtype=torch.int32, device=CUDA),
        positions=torch.zeros(n, dtype=torch.int64, device=CUDA),
        logits_indices=torch.from_numpy(rows).to(CUDA),
        cu_num_logits=torch.from_numpy(ends).to(CUDA),
        cu_num_logits_np=ends,
    )


def runner(asked: Any, library: FakeLibrary) -> Any:
    """A runner of a GPU with what a step reads, made without a model."""
    made: Any = V2TreeModelRunner.__new__(V2TreeModelRunner)
    head: Any = Head()
    head._draft_attn_layer_names = {"layer"}
    group = SimpleNamespace(world_size=2, broadcast=lambda tensor, src: library.get_function("broadcast")(tensor))
    ranks = RankAgreement(group, B, SHAPE.max_accept_length, CUDA)
    linear: Any = SimpleNamespace(commit=lambda *_: None)
    vars(made).update(
        device=CUDA,
        drafter=head,
        sampler=asked,
        model=SimpleNamespace(compute_logits=lambda hidden: torch.zeros(len(hidden), VOCABULARY, device=CUDA)),
        req_states=SimpleNamespace(num_computed_tokens=staged([9] * B), prefill_len=staged([9] * B)),
        attn_groups=[],
        model_config=SimpleNamespace(uses_mrope=True),
        structured_outputs_worker=None,
        num_speculative_steps=SHAPE.width - 1,
        max_num_tokens=64,
        use_async_scheduling=True,
        _asked=AskedSources(CUDA, chains=False),
        _caps=SHAPE,
        _deferred=DeferredTokens(16),
        _draft_clock=SimpleNamespace(time=lambda _, call: call(), time_reading=lambda _, call: call()),
        _ended_before=None,
        _has_reasoner=False,
        _longest=1000,
        _scheduled=SimpleNamespace(pending_structured_output_tokens=False, num_spec_tokens_to_schedule=SHAPE.width - 1),
        _shapes=RoundShapes(ShapeChooser(SHAPE, None)),
        _store=DraftStore(),
        _verifier=TreeVerifier([CacheGroup("layer", caches())], linear, None, "raw_logprobs", ranks),
        _with_grammar=set(),
    )
    made._store.put(NAMES, Drafts.plain(torch.zeros(B, dtype=torch.int64, device=CUDA), SHAPE.width))
    return made


@pytest.mark.parametrize("penalised", [False, True], ids=["free", "penalties"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step(
    library: FakeLibrary, name: str, greedy: bool, penalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own kernels around it left out: slots, penalties, and what it counts as rejected."""
    counts, lens = BATCHES[name]
    root_drafts.cache_clear()  # tensors of another library
    batch, made = input_batch(counts, lens), runner(sampler(greedy, penalised), library)
    n, penalties = sum(lens), []
    monkeypatch.setattr(GPUModelRunner, "prepare_attn", lambda *_: ((), torch.zeros(1, n, device=CUDA)))
    monkeypatch.setattr(v2_sampling, "apply_penalties", lambda *tensors: penalties.append(all_on_cuda(*tensors)))

    def sampled_and_rejected(lengths: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        assert all_on_cuda(lengths, *tensors)
        return lengths, tensors[1].diff() - lengths

    monkeypatch.setattr(v2_runner, "get_num_sampled_and_rejected", sampled_and_rejected)
    made.prepare_attn(batch)
    assert made._moved is not None and made._moved.shape == (n,) and all_on_cuda(made._moved)
    state = made._state
    assert all_on_cuda(*state.batch, batch.input_ids, batch.positions)
    state.layers = {"layer": TreeMetadata(state.batch.rows(), table(), torch.zeros(n, dtype=torch.int64, device=CUDA))}
    library.launched.clear()
    output, sampled, rejected = made.sample(torch.zeros(n, HIDDEN, device=CUDA), batch, None)
    assert all_on_cuda(output.sampled_token_ids, sampled, rejected, *state.accepted)
    assert penalties == [True] * penalised
    if any(counts):
        assert library.launched == ["verify_tree", "broadcast", "compact_kv"]
    tokens, features = torch.zeros(B, dtype=torch.int64, device=CUDA), [torch.zeros(n, HIDDEN, device=CUDA)] * 3
    drafted = made.draft(batch, tokens, features)
    assert all_on_cuda(drafted) and drafted.shape == (B, SHAPE.width - 1)
    assert all_on_cuda(*made._store.take(NAMES).tree)


@pytest.mark.parametrize("why", ["a long request", "no drafts wanted"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_without_drafts_is_read_too(
    library: FakeLibrary, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every request, so that the head misses no token when it drafts again; with positions that it has."""
    counts, lens = BATCHES[name]
    root_drafts.cache_clear()
    batch, made = input_batch(counts, lens), runner(sampler(True, False), library)
    n, read = sum(lens), list[tuple[int, int]]()
    monkeypatch.setattr(GPUModelRunner, "prepare_attn", lambda *_: ((), torch.zeros(1, n, device=CUDA)))
    made.prepare_attn(batch)
    state = made._state
    state.layers = {"layer": TreeMetadata(state.batch.rows(), table(), torch.zeros(n, dtype=torch.int64, device=CUDA))}
    tokens = torch.zeros(B, dtype=torch.int64, device=CUDA)
    e = SHAPE.max_accept_length
    paths = torch.zeros(B, e if any(counts) else 1, dtype=torch.int32, device=CUDA)
    state.accepted = Accepted(paths, torch.ones(B, dtype=torch.int32, device=CUDA), paths.long())
    state.draws = made._draws_of(batch)
    is_long = why == "a long request"
    if is_long:
        made._longest = 9 + max(lens) + SHAPE.width - 2
    clamped = list[int]()
    clamp = torch.Tensor.clamp

    def noted(tensor: Tensor, *bounds: Any, **named: Any) -> Tensor:
        if named.get("max") == made._longest - 1:
            clamped.append(len(tensor))
        return clamp(tensor, *bounds, **named)

    monkeypatch.setattr(torch.Tensor, "clamp", noted)
    monkeypatch.setattr(made.drafter, "read_deferred", lambda rows: read.append((len(rows.tokens), len(rows.lens))))
    features = [torch.zeros(n, HIDDEN, device=CUDA)] * 3
    drafted = made.draft(batch, tokens, features, plainly=not is_long)
    assert all_on_cuda(drafted) and made._store.take(NAMES) is None
    assert made._wanted == (PLAIN if is_long else SHAPE), "what a scheduler that is ahead hears"
    rows = sum(e if count else length for count, length in zip(counts, lens, strict=True))
    if is_long or any(counts):
        assert read == [(rows, B)] and clamped == [rows] * is_long
    else:
        assert not read and made._deferred.rows_of_requests == rows  # until it drafts again
    made._longest = 1000
    assert made.draft(batch, tokens, features).shape == (B, SHAPE.width - 1) and made._store.take(NAMES) is not None


@pytest.mark.parametrize(("wanted", "plainly"), [(None, False), (SHAPE.width - 1, False), (0, True)])
def test_the_engine_may_want_no_drafts(wanted: int | None, plainly: bool, library: FakeLibrary) -> None:
    """vLLM 0.33 asks for none where no request of the step can use them; the head reads it as a plain one."""
    asked, made = list[bool](), TreeSpeculator.__new__(TreeSpeculator)
    ids = torch.zeros(B, dtype=torch.int64, device=CUDA)

    def draft(batch: Any, next_tokens: Tensor, parts: list[Tensor], plainly: bool) -> Tensor:
        asked.append(plainly)
        return ids[:, None][:, :0]

    served = SimpleNamespace(draft=draft, keep_states=lambda *_: None)
    vars(made).update(_runner=served, draft_tokens=torch.ones(B, 3, dtype=torch.int64, device=CUDA))
    states, batch = torch.zeros(B, HIDDEN, device=CUDA), SimpleNamespace(idx_mapping=ids)
    given = (states, None, ids, ids, ids[:, None], ids[None], ids, ids)
    found = TreeSpeculator.propose(made, batch, None, None, *given, num_speculative_tokens=wanted)
    assert asked == [plainly] and found.shape == (B, 3)
