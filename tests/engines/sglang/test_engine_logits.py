"""The target's logits of captured rounds lie in the buffer that the engine's own graphs share, where it has one."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from engine_signatures import holds
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from toy_engine import COLUMNS, ROWS, SHAPE, TABLE, Drafter, V, Verifier

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer, recording_launches
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.capture import engine_logits
from eagle_plugin.sglang.decode_round import DecodeRound

MOST = 4
NODES = MOST * SHAPE.width


def runner_with(max_rows: int, *vocabularies: int) -> tuple[Any, GraphSharedOutput]:
    """One whose engine has buffers of so many rows for these vocabularies."""
    shared = GraphSharedOutput(device=torch.device("cpu"), max_rows=max_rows)
    for vocabulary in vocabularies:
        shared.get_logits_buffer(vocabulary, rows=1)
    return SimpleNamespace(graph_shared_output=shared), shared


def captured(runner: Any) -> DecodeRound:
    reader = BatchReader(SHAPE.reach, MOST, TABLE, KeyTable(ROWS, "cpu", seed=1), least=SHAPE.reach)
    decode_round = DecodeRound(Drafter(), Verifier(), reader)
    logits = partial(engine_logits, runner)
    with recording_launches():
        decode_round.capture(EmulatedCapturer(), SHAPE, [PLAIN, SHAPE], [2, MOST], GraphMemory(), False, logits)
    return decode_round


def test_rounds_use_the_engines_buffer() -> None:
    runner, shared = runner_with(NODES + 3, V)
    decode_round = captured(runner)
    logits = decode_round._memory.logits(MOST)
    buffer = shared.get_logits_buffer(V, rows=NODES + 3)
    assert logits.data_ptr() == buffer.data_ptr() and logits.dtype == torch.float32 and logits.shape == (NODES, V)
    info = SimpleNamespace(
        temperatures=torch.ones(3, 1), top_ks=torch.ones(3).int(), top_ps=torch.ones(3), min_ps=torch.zeros(3),
        is_all_greedy=True,
    )  # fmt: skip
    lengths = torch.tensor([4, 9, COLUMNS - SHAPE.reach - 2])
    schedule = SimpleNamespace(seq_lens=lengths, req_pool_indices=torch.arange(3) + 1, sampling_info=info)
    for shape in (PLAIN, SHAPE):
        batch = decode_round._reader.read(shape, schedule, decode_round.padded_b(3, shape))
        drafts = Drafts(DraftTree.padding(torch.arange(3) + 5, shape.width), shape)
        wanted = decode_round._verifier.forward(batch, drafts.tree.padded(MOST)).logits.clone()
        decode_round._memory.put_fields("tree", drafts.tree.padded(MOST))
        buffer.fill_(torch.nan)  # as prompts do, between rounds
        found = decode_round.verify(batch, drafts).logits
        assert found.data_ptr() == buffer.data_ptr()
        torch.testing.assert_close(found, wanted)
        assert buffer[MOST * shape.width :].isnan().all()


@pytest.mark.parametrize(
    "runner",
    [
        SimpleNamespace(),  # an engine without it
        SimpleNamespace(graph_shared_output=None),
        runner_with(NODES)[0],  # no prompts with graphs: its buffer would be larger than ours
        runner_with(NODES, V + 1)[0],
        runner_with(NODES - 1, V)[0],
    ],
    ids=["no such thing", "none", "not made", "another vocabulary", "too small"],
)
def test_otherwise_rounds_have_memory_of_their_own(runner: Any) -> None:
    shared = getattr(runner, "graph_shared_output", None)
    made = None if shared is None else dict(shared._logits_buffers)
    decode_round = captured(runner)
    assert decode_round._memory._flat["logits"].numel() == NODES * V
    assert shared is None or shared._logits_buffers.keys() == made.keys(), "it was made"


def test_prompts_and_the_engines_own_rounds_share_it() -> None:
    """What makes it safe for prompts and our rounds, whose order is the same."""
    for runner in (PrefillCudaGraphRunner, DecodeCudaGraphRunner):
        source = inspect.getsource(runner)
        assert "graph_shared_output" in source and ".get_logits_buffer(" in source
    # It is no tensor of inference mode, which could not be written outside of that.
    assert "@torch.no_grad()" in inspect.getsource(Scheduler.init_all_cuda_graphs)
    assert holds(Scheduler.init_all_cuda_graphs, "self.draft_worker.init_cuda_graphs()")
