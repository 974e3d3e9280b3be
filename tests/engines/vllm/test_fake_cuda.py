"""vLLM's decode round on fake CUDA tensors, with forwards of the two models that compute nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, all_on_cuda, require_cuda
from torch.utils._pytree import tree_leaves
from vllm import _custom_ops
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_fake_cuda import (
    BATCHES,
    BLOCK,
    HIDDEN,
    NAMES,
    SHAPE,
    VOCABULARY,
    B,
    BlockHead,
    Head,
    attention_layer,
    caches,
    linear_layer,
    metadata,
    read,
    run_linear_layer,
    table,
)

from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts, HeadState, TopM
from eagle_plugin.vllm import logits
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.attention import TreeMetadata, TreeMetadataBuilder
from eagle_plugin.vllm.batch import DraftStore
from eagle_plugin.vllm.deferred_extend import DeferredTokens, PlainRows
from eagle_plugin.vllm.head_forwards import DraftBatch, ExtendBatch
from eagle_plugin.vllm.linear_attention import LinearLayers, LinearMetadata
from eagle_plugin.vllm.logits import MinimalLength, node_rows
from eagle_plugin.vllm.logprobs import output_logprobs
from eagle_plugin.vllm.request_fields import AskedSources
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.sampling import RequestDraws, sampling_params
from eagle_plugin.vllm.shapes import RoundShapes
from eagle_plugin.vllm.verifier import TreeVerifier


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_round(library: FakeLibrary, name: str, greedy: bool) -> None:
    counts, lens = BATCHES[name]
    batch = read(counts, lens)
    rows = batch.rows()
    assert all_on_cuda(*batch, *batch.drafts.tree, batch.roots, *tree_leaves(rows))
    n, logits_rows = sum(lens), sum(counts) + B
    linear = SimpleNamespace(commit=lambda *_: None)
    sampler = SimpleNamespace(greedy_sample=lambda x: x.argmax(-1))
    group = SimpleNamespace(world_size=2, broadcast=lambda tensor, src: library.get_function("broadcast")(tensor))
    ranks = RankAgreement(group, B, SHAPE.max_accept_length, CUDA)
    groups = [CacheGroup("layer", caches())]
    verifier = TreeVerifier(groups, linear, sampler, "raw_logprobs", ranks)  # type: ignore[arg-type]
    found, layers = torch.zeros(logits_rows, VOCABULARY, device=CUDA), {"layer": SimpleNamespace(slot_table=table())}
    states = [SimpleNamespace(sampling_params=SimpleNamespace(min_tokens=0), num_prompt_tokens=4)] * B
    library.launched.clear()
    asked = metadata(greedy)
    draws = RequestDraws(VOCABULARY, CUDA, 0).of(asked, NAMES)
    output, accepted = verifier.verify(batch, found, asked, draws, states, layers)  # type: ignore[arg-type]
    assert all_on_cuda(output.sampled_token_ids, *accepted)
    if any(counts):
        assert library.launched == ["verify_tree", "broadcast", "compact_kv"]
    next_tokens = torch.zeros(B, dtype=torch.int32, device=CUDA)
    ids, positions = torch.zeros(n, dtype=torch.int32, device=CUDA), torch.zeros(n, dtype=torch.int64, device=CUDA)
    features = torch.zeros(n, 3 * HIDDEN, device=CUDA)
    assert all_on_cuda(*PlainRows.after(batch, next_tokens, ids, features))
    extend = ExtendBatch.after(batch, accepted, next_tokens, ids, positions)
    head = Head()
    state = head.extend(extend, features, table(), SHAPE, greedy)
    assert all_on_cuda(*extend, *state) and len(state.hidden) == B and state.top.logp.dim() == 2
    head.levels = HeadLevels(MaskRow(7, torch.zeros(1, HIDDEN, device=CUDA)))
    state = head.extend(extend, features, table(), SHAPE, greedy)
    assert all_on_cuda(*state) and state.top.logp.shape[:2] == (B, SHAPE.steps)
    head.max_num_tokens = len(extend.tokens)  # no room for masked rows
    assert head.extend(extend, features, table(), SHAPE, greedy).top.logp.dim() == 2
    head.method = "mtp"  # a target's own layer reads its last states as they are
    assert all_on_cuda(*head.extend(extend, features[:, :HIDDEN], table(), SHAPE, greedy))
    state = BlockHead().extend(extend, features, table(), SHAPE, greedy)
    assert all_on_cuda(*state) and state.top.logp.shape[:2] == (B, SHAPE.steps)
    state = BlockHead().with_markov().extend(extend, features, table(), SHAPE, greedy)
    assert all_on_cuda(*state) and state.top.logp.dim() == 2 and state.hidden.shape == (B, SHAPE.steps, HIDDEN)


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_of_the_gpus_runner(
    library: FakeLibrary, name: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own methods, with those of the engine that they call around them left out."""
    counts, lens = BATCHES[name]
    runner, n = step_runner(), sum(lens)
    prepared = None, SimpleNamespace(num_draft_tokens=counts)
    monkeypatch.setattr(GPUModelRunner, "_prepare_inputs", lambda *_: prepared)
    scheduled = SimpleNamespace(
        pending_structured_output_tokens=False,
        num_spec_tokens_to_schedule=SHAPE.width - 1,
        total_num_scheduled_tokens=sum(lens),
    )
    assert runner._prepare_inputs(scheduled, np.array(lens)) is prepared
    rows = runner._state.batch.rows()
    built = {"layer": TreeMetadata(rows, table(), torch.zeros(n, dtype=torch.int64, device=CUDA))}
    monkeypatch.setattr(GPUModelRunner, "_build_attention_metadata", lambda *_: (built, None))
    builder = SimpleNamespace(rows=None)
    runner.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda: builder)]]
    assert runner._build_attention_metadata() == (built, None) and builder.rows is None
    accepted = torch.zeros(B, SHAPE.max_accept_length if any(counts) else 1, dtype=torch.int64, device=CUDA)
    runner._state.accepted = Accepted(accepted.int(), accepted[:, 0].int() + 1, accepted)
    features = [torch.zeros(n, HIDDEN, device=CUDA)] * 3
    step = SimpleNamespace(total_num_scheduled_tokens=n)
    asked = metadata(greedy)
    runner._state.draws = runner._draws.of(asked, NAMES)
    drafted = runner.propose_draft_token_ids(
        step, accepted.int(), asked, features[0], features[0], features, None, None, None
    )
    assert all_on_cuda(drafted, runner.positions, runner.input_ids.gpu) and drafted.shape == (B, SHAPE.width - 1)
    assert all_on_cuda(*runner._store.take(NAMES).tree)


def step_runner() -> Any:
    """A runner of a GPU with what a step reads, made without a model."""
    runner: Any = TreeModelRunner.__new__(TreeModelRunner)
    nothing = torch.zeros(64, dtype=torch.int32, device=CUDA)
    head: Any = Head()
    head.prepare_next_token_ids_padded = lambda *_: (nothing[:B], nothing[:B])
    head._draft_attn_layer_names = {"layer"}
    state = SimpleNamespace(sampling_params=SimpleNamespace(structured_outputs=None))
    vars(runner).update(
        device=CUDA,
        drafter=head,
        input_ids=SimpleNamespace(gpu=nothing),
        positions=nothing.long(),
        enable_prompt_embeds=True,
        is_token_ids=SimpleNamespace(np=np.zeros(64, dtype=bool), copy_to_gpu=lambda rows: None),
        uses_mrope=True,
        mrope_positions=SimpleNamespace(gpu=nothing.long().expand(3, -1).clone()),
        num_computed_tokens=torch.full((B,), 9, dtype=torch.int32, device=CUDA),
        input_batch=SimpleNamespace(
            req_ids=NAMES,
            num_computed_tokens_cpu=np.full(B, 9),
            num_prompt_tokens=np.full(B, 5),
            vocab_size=VOCABULARY,
        ),
        requests=dict.fromkeys(NAMES, state),
        discard_request_mask=SimpleNamespace(gpu=nothing[:B] > 0, np=np.zeros(B, dtype=bool)),
        max_num_tokens=64,
        use_async_scheduling=True,
        _asked=AskedSources(CUDA, chains=False),
        _caps=SHAPE,
        _copy_valid_sampled_token_count=lambda *_: None,
        _draws=RequestDraws(VOCABULARY, CUDA, 0),
        _draft_clock=SimpleNamespace(time=lambda _, call: call(), time_reading=lambda _, call: call()),
        _has_reasoner=False,
        _deferred=DeferredTokens(BLOCK),
        _shapes=RoundShapes(ShapeChooser(SHAPE, None)),
        _step=None,
        _store=DraftStore(),
    )
    runner._store.put(NAMES, Drafts.plain(torch.zeros(B, dtype=torch.int64, device=CUDA), SHAPE.width))
    return runner


@pytest.mark.parametrize("name", [name for name in BATCHES if name != "no tree"])
def test_penalties_and_bias_at_every_node(library: FakeLibrary, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own functions around them: its list of tokens in pinned memory, and its CUDA kernel."""
    asked = metadata(greedy=False)
    asked.no_penalties, asked.output_token_ids = False, [[5, 6]] * B
    asked.prompt_token_ids = torch.zeros(B, 4, dtype=torch.int64, device=CUDA)
    ones = torch.ones(B, device=CUDA)
    asked.presence_penalties = asked.frequency_penalties = asked.repetition_penalties = ones
    asked.allowed_token_ids_mask = torch.zeros(B, VOCABULARY, dtype=torch.bool, device=CUDA)
    bias, least = LogitBiasLogitsProcessor.__new__(LogitBiasLogitsProcessor), MinTokensLogitsProcessor
    bias.biases = {1: {3: 0.5, 7: 1.0}}
    asked.logitsprocs = LogitsProcessors([bias, least.__new__(least)])
    monkeypatch.setattr(logits, "_convert_to_tensors", lambda *_: torch.zeros(B, 2, dtype=torch.int64, device=CUDA))
    monkeypatch.setattr(_custom_ops, "apply_repetition_penalties", lambda *tensors: all_on_cuda(*tensors))
    batch = read(*BATCHES[name])
    n = sum(BATCHES[name][0]) + B
    minimal = [MinimalLength(i, 40, [7, 9], structured) for i, structured in enumerate([True, False])]
    rows = node_rows(B, batch.width, batch.logits_rows, n, CUDA)
    given = torch.zeros(n, VOCABULARY, device=CUDA)
    tree = batch.all_drafts().tree
    assert all_on_cuda(*rows, logits.transform_logits(asked, tree, batch.roots, minimal, rows, given))


@pytest.mark.parametrize("with_min_p", [False, True])
def test_processed_logits(library: FakeLibrary, with_min_p: bool) -> None:
    asked, length = metadata(greedy=False), 3
    asked.max_num_logprobs = 2
    if with_min_p:
        least = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        least.min_p_count, least.min_p = 1, torch.zeros(B, 1, device=CUDA)
        asked.logitsprocs = LogitsProcessors([least])
    params = sampling_params(asked, logits.min_ps(asked, B), B, VOCABULARY, CUDA)
    rows, tokens = (
        torch.zeros(B * length, VOCABULARY, device=CUDA),
        torch.zeros(B, length, dtype=torch.int64, device=CUDA),
    )
    accepted = Accepted(tokens, tokens[:, 0], tokens)
    sampler = SimpleNamespace(gather_logprobs=lambda *given: given)  # vLLM's counts by a compiled function
    found, most, drawn = output_logprobs(sampler, "processed_logits", asked, params, rows, rows, accepted)
    assert all_on_cuda(found, drawn) and most == 2


@pytest.mark.parametrize("parallel", [False, True], ids=["levels one by one", "all levels at once"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_drafting(library: FakeLibrary, greedy: bool, parallel: bool) -> None:
    head, roots = Head(), torch.zeros(B, dtype=torch.int64, device=CUDA)
    if parallel:
        head.levels = HeadLevels(MaskRow(7, torch.zeros(1, HIDDEN, device=CUDA)))
    top = TopM(torch.zeros(B, 128, device=CUDA), torch.zeros(B, 128, dtype=torch.int64, device=CUDA))
    params = sampling_params(metadata(greedy), None, B, VOCABULARY, CUDA)
    chains = torch.zeros(B, dtype=torch.bool, device=CUDA)
    for held in (None, chains):
        batch = DraftBatch(SHAPE, roots + 9, table(), params, None if greedy else roots, held)
        drafts = head.draft_tree(batch, roots, HeadState(top, torch.zeros(B, HIDDEN, device=CUDA)))
        assert all_on_cuda(*drafts.tree)


@pytest.mark.parametrize("float8", [False, True], ids=["", "8-bit cache"])
@pytest.mark.parametrize("name", BATCHES)
def test_attention(library: FakeLibrary, name: str, float8: bool) -> None:
    batch = read(*BATCHES[name])
    layer, n = attention_layer(**({"kv_cache_dtype": "fp8"} if float8 else {})), sum(batch.host_lens)
    scales = SimpleNamespace(_k_scale=torch.ones((), device=CUDA), _v_scale=torch.ones((), device=CUDA))
    common = SimpleNamespace(
        block_table_tensor=torch.zeros(B, 8, dtype=torch.int32, device=CUDA),
        max_seq_len=90,
        slot_mapping=torch.zeros(n, dtype=torch.int64, device=CUDA),
    )
    builder = TreeMetadataBuilder.__new__(TreeMetadataBuilder)
    builder.block_size, builder.reach, builder.rows, builder.places = BLOCK, SHAPE.width, batch.rows(), {}
    built = builder.build(0, common)
    assert all_on_cuda(built.slot_table, built.slots)
    dtype = torch.uint8 if float8 else torch.float32
    cache = torch.zeros(20, BLOCK, 2, 128, dtype=dtype, device=CUDA).transpose(1, 2)
    q, k = torch.zeros(n, 4, 64, device=CUDA), torch.zeros(n, 2, 64, device=CUDA)
    library.launched.clear()
    assert all_on_cuda(layer.forward(scales, q, k, k, cache, built, torch.zeros_like(q)))
    launches = {"a tree beside a prompt and a plain request": 3}.get(name, 1)  # a kind of rows each
    stored = "store_kv (Triton)" if float8 else "store_kv"
    assert library.launched == [stored, *["tree_attention (Triton)"] * launches]


@pytest.mark.parametrize("name", BATCHES)
def test_linear_layers(library: FakeLibrary, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read(*BATCHES[name])
    metadata = LinearMetadata(batch.rows(), torch.zeros(B, dtype=torch.int64, device=CUDA))
    layer = linear_layer("layer")
    n = sum(batch.host_lens)
    run_linear_layer(monkeypatch, layer, metadata, n)
    launched = [kernel for kernel in library.launched if "trees" in kernel]
    paths = {"a tree beside a prompt and a plain request": 2, "no tree": 1}.get(name, 0)  # equally long ones together
    each = ["attend_trees (Triton)", "commit_trees (Triton)"]
    assert launched == each * paths + each[: bool(len(batch.trees))]
    if len(batch.trees):
        served = LinearLayers.__new__(LinearLayers)
        served._layers = [layer]  # type: ignore[list-item]
        tokens = torch.zeros(B, SHAPE.max_accept_length, dtype=torch.int64, device=CUDA)
        assert all_on_cuda(metadata.left["layer"])
        served.commit({"layer": metadata}, Accepted(tokens.int(), tokens[:, 0].int(), tokens))
        assert not metadata.left


def test_tokens_that_the_head_has_not_read(library: FakeLibrary) -> None:
    batch, kept = read(*BATCHES["no tree"]), DeferredTokens(BLOCK)
    ids, features = torch.zeros(B, dtype=torch.int32, device=CUDA), torch.zeros(B, 3 * HIDDEN, device=CUDA)
    for step in range(2):
        rows = PlainRows.after(batch, ids, ids, features)
        kept.add(NAMES, [9 + step] * B, batch.host_lens, rows, table())
    for rows in kept.take(NAMES, 4):
        assert all_on_cuda(*rows)
        Head().read_deferred(rows)


def test_the_guard_finds_a_wait(library: FakeLibrary) -> None:
    """The controls: a number that the host reads, and a tensor that is on the CPU."""
    batch = read(*BATCHES["a tree cut short"])
    with pytest.raises(Exception, match="_local_scalar_dense"):
        int(batch.lens.sum())
    with pytest.raises(TypeError, match="wanted a CUDA device"):
        require_cuda("slots", torch.zeros(3))
