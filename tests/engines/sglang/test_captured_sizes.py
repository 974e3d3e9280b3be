"""For which batch sizes a server's rounds are captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

import toy_engine
from toy_engine import DRAFT_V, Drafter, H, Verifier

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.runtime.capturing import gpu_sizes
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer, recording_launches
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.sglang import capture
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState


@contextlib.contextmanager
def graph_settings(disable_cuda_graph_padding: bool = False) -> Iterator[None]:
    """What the engine has of its flags."""
    graph = SimpleNamespace(disable_cuda_graph_padding=disable_cuda_graph_padding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "get_exec", lambda: SimpleNamespace(graph=graph))
        yield


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (100, [1, 2, 4, 8, 96, 100]),  # the largest batch is not in the engine's list
        (96, [1, 2, 4, 8, 96]),
        (3, [1, 2, 3]),
        (200, [1, 2, 4, 8, 96, 104]),  # the user limits them
    ],
)
def test_sizes_are_those_of_the_engine(most: int, sizes: list[int]) -> None:
    with graph_settings():
        assert capture.sizes_up_to(most, [1, 2, 4, 8, 96, 104]) == sizes


def test_of_the_many_sizes_of_the_engine_some_are_captured() -> None:
    engines = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]  # its default for speculation
    with graph_settings():
        assert capture.sizes_up_to(512, engines) == gpu_sizes(256)
        assert capture.sizes_up_to(200, engines) == gpu_sizes(200)
        assert capture.sizes_up_to(512, range(5, 101, 5)) == list(range(5, 101, 5)), "a list of the user's own"
    with graph_settings(disable_cuda_graph_padding=True):
        assert capture.sizes_up_to(30, range(1, 31)) == list(range(1, 31))


@pytest.mark.parametrize("width", [16, 64])
def test_no_size_is_left_out_because_of_the_caps(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    found: list[Any] = []
    decode_round: Any = SimpleNamespace(
        functions=[], sizes=list, capture=lambda _, caps, shapes, sizes, *more: found.append(sizes)
    )
    monkeypatch.setattr(capture, "model_capture_mode", contextlib.nullcontext)
    monkeypatch.setattr(capture, "rank_logger", lambda logger: logger)
    capture.capture_rounds(decode_round, Shape(3, 4, width), [PLAIN], "cpu", 128, True, None)
    assert found == [[1, 2, 4, 8, 16, 32, 64, 128]]


def test_forty_requests_of_a_server_for_trees_of_64_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plain rounds and its narrow trees are replayed, though 40 trees of 64 nodes are not captured."""
    rows, columns, caps, b = 48, 160, Shape(6, 4, 64), 40
    monkeypatch.setattr(toy_engine, "ROWS", rows)
    monkeypatch.setattr(toy_engine, "COLUMNS", columns)
    table = torch.randperm(rows * columns - 1).add(1)[: 47 * 150].view(47, 150).int()
    table = torch.cat([torch.zeros_like(table[:1]), table])
    decode_round = DecodeRound(Drafter(), Verifier(), BatchReader(caps.reach, 48, table, KeyTable(rows, "cpu", seed=1)))
    shapes = [PLAIN, Shape(2, 2, 4), caps]
    with recording_launches():
        decode_round.capture(EmulatedCapturer(), caps, shapes, [16, 48], GraphMemory())
    ones = torch.ones(b)
    info = SimpleNamespace(
        temperatures=ones[:, None], top_ks=ones.int(), top_ps=ones, min_ps=torch.zeros(b), is_all_greedy=True
    )
    schedule = SimpleNamespace(seq_lens=torch.full((b,), 20), req_pool_indices=torch.arange(b) + 1, sampling_info=info)
    top = TopM(torch.randn(b, DRAFT_V).log_softmax(1), torch.arange(DRAFT_V).repeat(b, 1))
    state = DraftState(HeadState(top, torch.randn(b, H)), torch.zeros(b, dtype=torch.int64))
    assert decode_round.allowed(b) == (PLAIN, Shape(2, 2, 4))
    for shape in (PLAIN, Shape(2, 2, 4)):
        batch = decode_round._reader.read(shape, schedule, decode_round.padded_b(b, shape))
        replays = decode_round.functions.replays
        drafts = decode_round.draft(batch, state)
        output = decode_round.verify(batch, drafts)
        accepted = decode_round.walk(batch, drafts, output)
        decode_round.extend(batch, accepted, output, state)
        assert batch.padded_b == 48 and decode_round.is_captured(batch)
        assert decode_round.functions.replays == replays + 4
