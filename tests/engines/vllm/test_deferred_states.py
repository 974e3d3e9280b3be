"""Any order of prompts, plain and drafted steps, ends and preemptions: the head has read what it drafts after.

A small world stands for vLLM: its scheduler with a prefix cache that gives blocks away anew, and two caches that hold
at each slot which row was written there, one of the target and one of the head. Before the head drafts for a request,
its cache has at every position of the request what the target's step had there: the token after it, and its state.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from state_machines import run

from eagle_plugin.runtime import deferred_limit
from eagle_plugin.vllm.deferred_extend import DeferredRows, DeferredTokens, Owner, PlainRows

BLOCK, BLOCKS, LONGEST = 2, 24, 16  # block 0 is nobody's
ALPHABET = 2  # tokens: with few of them prompts begin alike
ROWS_KEPT = 20  # by the limit of what is deferred


def state_of(text: list[int], position: int) -> int:
    """The target's state at a position: it differs where anything up to there differs."""
    return hash(tuple(text[: position + 1])) % 2**31


class Request:
    """One request: its text is known ahead, so that a step only moves `computed`."""

    def __init__(self, name: str, text: list[int], prompt: int) -> None:
        self.name, self.text, self.prompt = name, text, prompt
        self.blocks: list[int] = []
        self.computed = self.found = 0  # found: in the prefix cache

    @property
    def ends(self) -> bool:
        """The token after the last computed one is not known."""
        return self.computed >= len(self.text) - 1


class World(RuleBasedStateMachine):
    """vLLM's scheduler and runner, as far as `DeferredTokens` knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = DeferredTokens(BLOCK)
        self.free = list(range(1, BLOCKS))  # the least recently freed first
        self.hashes: dict[tuple[int, ...], int] = {}
        self.head: dict[int, tuple[int, int]] = {}  # by slot: token, state
        self.running: dict[str, Request] = {}
        self.waiting: list[Request] = []  # new ones, and those that were preempted
        self.known: set[str] = set()  # to the runner
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.count = 0

    # --- the scheduler

    def _allocate(self) -> int:
        """A block; what it held before is found by nobody."""
        block = self.free.pop(0)
        self.hashes = {key: one for key, one in self.hashes.items() if one != block}
        return block

    def _found(self, text: list[int]) -> list[int]:
        """Of the prefix cache, without the last block that is found: the head reads the token after each row."""
        found = []
        for end in range(BLOCK, len(text), BLOCK):
            if (block := self.hashes.get(tuple(text[:end]))) is None:
                break
            found.append(block)
        return found[:-1]

    def _extend(self, request: Request, end: int) -> list[int]:
        """New blocks up to position `end`; full ones are found from now on, although the step is still to come."""
        new = []
        while len(request.blocks) * BLOCK < end:
            new.append(self._allocate())
            request.blocks.append(new[-1])
        for i in range(end // BLOCK):
            self.hashes.setdefault(tuple(request.text[: (i + 1) * BLOCK]), request.blocks[i])
        return new

    def _release(self, request: Request) -> None:
        held = {block for one in self.running.values() if one is not request for block in one.blocks}
        self.free += [block for block in reversed(request.blocks) if block not in held]

    @rule(text=st.lists(st.integers(0, ALPHABET - 1), min_size=3, max_size=LONGEST), data=st.data())
    def join(self, text: list[int], data: st.DataObject) -> None:
        """A request comes."""
        self.count += 1
        self.waiting.append(Request(f"r{self.count}", text, data.draw(st.integers(1, len(text) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request ends or is aborted."""
        self._end(data.draw(st.sampled_from(sorted(self.running))))

    def _end(self, name: str) -> None:
        self._release(self.running.pop(name))
        self.finished.add(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A request gives its blocks up, and begins anew later."""
        self._preempt(data.draw(st.sampled_from(sorted(self.running))))

    def _preempt(self, name: str) -> None:
        request = self.running.pop(name)
        self._release(request)
        request.blocks, request.computed, request.found = [], 0, 0
        self.preempted.add(request.name)
        self.waiting.append(request)

    # --- a step

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data(), drafts=st.booleans())
    def step(self, data: st.DataObject, drafts: bool) -> None:
        """Every request that runs computes some rows; after that the head drafts, or puts its reading off."""
        cached: dict[str, list[Any]] = {"req_ids": [], "num_computed_tokens": [], "new_block_ids": []}
        lens: dict[str, int] = {}
        for request in list(self.running.values()):
            lens[request.name] = n = self._rows(request, data)
            needed = -(-(request.computed + n) // BLOCK) - len(request.blocks)
            if needed > len(self.free):
                del lens[request.name]
                self._preempt(request.name)
                continue
            new = self._extend(request, request.computed + n)
            self._schedule(cached, request, (new,) if new else None)
        entered, resumed = [], set()
        # A request that gave its blocks up waits for a later step, and so does all that waits.
        while self.waiting and not self.preempted and data.draw(st.booleans()):
            request = self.waiting[0]
            request.blocks = self._found(request.text)
            self.free = [block for block in self.free if block not in request.blocks]
            request.computed = request.found = len(request.blocks) * BLOCK
            lens[request.name] = n = self._rows(request, data)
            if -(-(request.computed + n) // BLOCK) - len(request.blocks) > len(self.free):
                self.running[request.name] = request  # for `_release`
                self._release(self.running.pop(request.name))
                request.blocks, request.computed, request.found = [], 0, 0
                del lens[request.name]
                break
            self.waiting.pop(0)
            self._extend(request, request.computed + n)
            if request.name in self.known:
                resumed.add(request.name)
                self._schedule(cached, request, (list(request.blocks),))
            else:
                blocks = (list(request.blocks),)
                entered.append(SimpleNamespace(num_computed_tokens=request.computed, block_ids=blocks))
            self.running[request.name] = request
            self.known.add(request.name)
        gone, self.finished, self.preempted = self.finished | self.preempted, set(), set()
        output = SimpleNamespace(
            scheduled_new_reqs=entered,
            scheduled_cached_reqs=SimpleNamespace(**cached, resumed_req_ids=resumed),
        )
        self._read(self.kept.wanted_by_blocks(output, gone & self.known), data)
        self.kept.forget(gone)
        self._compute([self.running[name] for name in lens], list(lens.values()), drafts, data)
        for name in [name for name, request in self.running.items() if request.ends]:
            self._end(name)

    @staticmethod
    def _rows(request: Request, data: st.DataObject) -> int:
        left = request.prompt - request.computed
        return data.draw(st.integers(1, min(left, 5))) if left > 1 else 1

    @staticmethod
    def _schedule(cached: dict[str, list[Any]], request: Request, blocks: tuple[list[int], ...] | None) -> None:
        cached["req_ids"].append(request.name)
        cached["num_computed_tokens"].append(request.computed)
        cached["new_block_ids"].append(blocks)

    # --- the head

    def _compute(self, batch: list[Request], lens: list[int], drafts: bool, data: st.DataObject) -> None:
        if not batch:
            return
        names, firsts = [one.name for one in batch], [one.computed for one in batch]
        positions = [range(first, first + n) for first, n in zip(firsts, lens, strict=True)]
        tokens = [one.text[p + 1] for one, places in zip(batch, positions, strict=True) for p in places]
        states = [state_of(one.text, p) for one, places in zip(batch, positions, strict=True) for p in places]
        for one, n in zip(batch, lens, strict=True):
            one.computed += n
        table = torch.stack([self._slots(one) for one in batch])
        rows = PlainRows(torch.tensor(tokens).int(), torch.tensor(states, dtype=torch.float64)[:, None])
        if not drafts and self.kept.can_keep([rows.features]):
            requests = {one.name: SimpleNamespace(block_ids=(one.blocks,)) for one in batch}
            self._read(self.kept.excess(rows), data)
            self.kept.add(names, firsts, lens, rows, table, requests)
            return
        self._read(names, data)
        slots = [int(table[i, p]) for i, places in enumerate(positions) for p in places]
        self.head |= dict(zip(slots, zip(tokens, states, strict=True), strict=True))
        for one in batch:
            self._check(one)

    def _slots(self, request: Request) -> torch.Tensor:
        slots = [block * BLOCK + i for block in request.blocks for i in range(BLOCK)]
        return torch.tensor(slots + [0] * (BLOCKS * BLOCK - len(slots)), dtype=torch.int32)

    def _read(self, owners: Iterable[Owner], data: st.DataObject) -> None:
        for rows in self.kept.take(owners, data.draw(st.integers(1, 9))):
            self._read_rows(rows)

    def _read_rows(self, rows: DeferredRows) -> None:
        owners = rows.rows.requests.repeat_interleave(rows.rows.lens)
        slots = rows.slot_table[owners, rows.positions].tolist()
        self.head |= dict(
            zip(slots, zip(rows.tokens.tolist(), rows.features[:, 0].long().tolist(), strict=True), strict=True)
        )

    def _check(self, request: Request) -> None:
        slots = self._slots(request).tolist()
        for p in range(request.computed):
            token, state = self.head.get(slots[p], (None, None))
            # vLLM keeps two blocks of one text, and finds the older: after its last row another token may have come.
            is_right = token == request.text[p + 1] or (p % BLOCK == BLOCK - 1 and p < request.found)
            assert is_right and state == state_of(request.text, p), f"{request.name}, {p} of {request.computed}"

    @invariant()
    def the_store_is_whole(self) -> None:
        """Every place of it is free, or holds one row; no more are kept than may be."""
        taken = [place for entry in self.kept._kept.values() for place in entry.places]
        of_requests = [len(entry.places) for owner, entry in self.kept._kept.items() if isinstance(owner, str)]
        assert self.kept.rows_of_requests == sum(of_requests)
        assert sorted(taken + self.kept._free) == list(range(len(self.kept._features)))
        assert len(taken) <= len(self.kept._features) <= ROWS_KEPT
        assert all(isinstance(owner, int) or owner in self.running or owner in self.finished | self.preempted
                   for owner in self.kept._kept)  # fmt: skip


@pytest.fixture(autouse=True)
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_limit, "MOST_BYTES", ROWS_KEPT * 8)


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.matrix)])
def test_the_head_has_read_what_it_drafts_after(examples: int) -> None:
    run(World, examples)


FAULTS = {
    "blocks that are found are not read": ("of_blocks", lambda self, blocks: []),
    "what a request leaves is dropped": ("leave", lambda self, names: self.forget(names)),
    "blocks that are given anew keep their rows": ("forget", lambda self, owners: None),
    "the limit is not kept": ("excess", lambda self, rows: []),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    monkeypatch.setattr(DeferredTokens, *FAULTS[fault])
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run(World, 2000, shrinks=False)
