"""Any order of prefills, plain and drafted rounds, ends and retractions: before it drafts, the head has read what the
target had at every token.

A small world stands for SGLang's batches. Each token has a number of its own, and so has the target's state before it;
rows of the request table and their slots are given to other requests later.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from state_machines import run

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from toy_engine import TABLE

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.sglang import deferred_extend
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.deferred_extend import DeferredTokens
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.worker import TreeWorker

REQUESTS = 5  # rows 1 .. 5 of the table
MOST, AT_ONCE = 7, 3  # deferred tokens per request, and of them those that one forward reads
TREE = Shape(2, 2, 4)


class Request:
    """A request: token and state of each position, and what the host knows of its answer."""

    def __init__(self, tokens: list[tuple[int, int]]) -> None:
        self.tokens, self.row = tokens, 0
        self.output_ids: list[int] = []


class Recorder:
    """In place of the head: remembers which token and state it has read in each slot."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[int, int]] = {}

    def relayed(self, state: DraftState) -> DraftState:
        return state

    def extend(self, batch: Any, accepted: Accepted, path: Any, states: torch.Tensor) -> DraftState:
        b, longest = accepted.tokens.shape
        states = states.view(b, longest, -1)
        for i in range(b):
            for j in range(int(accepted.lengths[i])):
                slot = int(batch.start.slots[i, j])
                if slot:  # 0: a request without deferred tokens has one row, which nobody looks at
                    self.cache[slot] = int(accepted.tokens[i, j]), int(states[i, j, 0])
        return state_of(b)


def state_of(b: int) -> DraftState:
    return DraftState(HeadState(TopM(torch.zeros(b, 2), torch.zeros(b, 2).long()), torch.zeros(b, 1)), torch.zeros(b))


class World(RuleBasedStateMachine):
    """SGLang's running requests, as far as `DeferredTokens` knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred = DeferredTokens(REQUESTS + 1, torch.zeros(1))
        self.head = Recorder()
        reader = BatchReader(8, REQUESTS + 1, TABLE[: REQUESTS + 1], KeyTable(REQUESTS + 1, "cpu", seed=1))
        self.worker = SimpleNamespace(
            _draft_worker=self.head,
            _round=SimpleNamespace(deferred=self.deferred),
            _reader=reader,
            shapes=SimpleNamespace(pause=lambda: None),
        )
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.free = list(range(1, REQUESTS + 1))
        self.count = 0
        self.late = 0

    @initialize(late=st.integers(0, 1))
    def begin(self, late: int) -> None:
        """late: tokens that the host has less, as with overlap scheduling."""
        self.late = late

    def token(self) -> tuple[int, int]:
        self.count += 1
        return self.count, 100_000 + self.count

    def slots(self, request: Request) -> list[int]:
        return TABLE[request.row, : len(request.tokens)].tolist()

    def prefill(self, request: Request) -> None:
        """The engine reads the whole text, and the head with it."""
        request.row = self.free.pop(0)
        self.running.append(request)
        self.deferred.forget(torch.tensor([request.row]))
        self.head.cache |= dict(zip(self.slots(request), request.tokens, strict=True))
        request.output_ids = [0] * (1 - self.late)

    @precondition(lambda self: self.free)
    @rule(length=st.integers(1, 6))
    def join(self, length: int) -> None:
        """A request comes."""
        self.prefill(Request([self.token() for _ in range(length)]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retracted=st.booleans())
    def leave(self, data: st.DataObject, retracted: bool) -> None:
        """A request ends, or gives its slots up and is read again later."""
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.free.append(request.row)
        if retracted:
            self.retracted.append(request)

    @precondition(lambda self: self.retracted and self.free)
    @rule()
    def resume(self) -> None:
        """It is read again, maybe in another row."""
        self.prefill(self.retracted.pop(0))

    def round_begins(self, shape: Shape) -> Any:
        """What the worker does with a batch of all requests before a round."""
        info = SimpleNamespace(
            temperatures=torch.ones(len(self.running), 1), top_ks=torch.ones(len(self.running), dtype=torch.int32),
            top_ps=torch.ones(len(self.running)), min_ps=torch.zeros(len(self.running)), is_all_greedy=True,
        )  # fmt: skip
        batch = SimpleNamespace(
            seq_lens=torch.tensor([len(one.tokens) for one in self.running]),
            req_pool_indices=torch.tensor([one.row for one in self.running]),
            sampling_info=info,
            spec_info=state_of(len(self.running)),
        )
        TreeWorker._caught_up(self.worker, batch, shape, self.deferred.longest(self.running))  # type: ignore[arg-type]
        return batch

    @precondition(lambda self: self.running and all(len(one.tokens) < 40 for one in self.running))
    @rule(times=st.integers(1, 4))
    def plain_rounds(self, times: int) -> None:
        """Every request gets a token that the head does not read."""
        for _ in range(times):
            batch = self.round_begins(PLAIN)
            made = [self.token() for _ in self.running]
            self.deferred.rounds += 1
            self.deferred.add(
                SimpleNamespace(requests=batch.req_pool_indices),  # type: ignore[arg-type]
                Accepted(torch.zeros(0), torch.ones(0), torch.tensor([[token] for token, _ in made])),
                torch.tensor([[float(state)] for _, state in made]),
            )
            for request, one in zip(self.running, made, strict=True):
                request.tokens.append(one)
                request.output_ids.append(0)

    @precondition(lambda self: self.running and all(len(one.tokens) < 40 for one in self.running))
    @rule(accepted=st.integers(1, TREE.steps + 1))
    def drafted_round(self, accepted: int) -> None:
        """The head drafts; what is accepted it reads itself."""
        self.round_begins(TREE)
        for request in self.running:
            slots = self.slots(request)
            found = [self.head.cache.get(slot) for slot in slots]
            assert found == request.tokens, "the head has not read what the target had"
        for request in self.running:
            request.tokens += [self.token() for _ in range(accepted)]
            self.head.cache |= dict(zip(self.slots(request), request.tokens, strict=True))
            request.output_ids += [0] * accepted

    @invariant()
    def no_more_is_kept_than_may_be(self) -> None:
        """No request has more deferred tokens than the store holds."""
        assert int(self.deferred._counts.max()) <= MOST


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_extend, "MOST_TOKENS", MOST)
    monkeypatch.setattr(deferred_extend, "DEFERRED_TOKENS", AT_ONCE)


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.matrix)])
def test_the_head_has_read_what_it_drafts_after(examples: int) -> None:
    run(World, examples)


def nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill leaves the tokens of the request that had the row before."""
    monkeypatch.setattr(World, "prefill", _without_forgetting)


def _without_forgetting(world: World, request: Request) -> None:
    request.row = world.free.pop(0)
    world.running.append(request)
    world.head.cache |= dict(zip(world.slots(request), request.tokens, strict=True))
    request.output_ids = [0] * (1 - world.late)


def the_bound_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host believes that there is one token less."""
    healthy = DeferredTokens.longest
    monkeypatch.setattr(DeferredTokens, "longest", lambda self, requests: max(healthy(self, requests) - 1, 0))


def nobody_reads_before_the_store_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last place is written over and over."""

    def caught_up(self: Any, batch: Any, shape: Shape, longest: int) -> DraftState:
        state, deferred = self._draft_worker.relayed(batch.spec_info), self._round.deferred
        return deferred.read(batch, self._reader, self._draft_worker, state, longest) if shape != PLAIN else state

    monkeypatch.setattr(TreeWorker, "_caught_up", caught_up)


@pytest.mark.parametrize("fault", [nothing_is_forgotten, the_bound_is_too_small, nobody_reads_before_the_store_is_full])
def test_a_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):  # the kernel refuses what counts too many tokens
        run(World, 200, shrinks=False)
