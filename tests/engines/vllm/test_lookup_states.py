"""Any order of prompts in chunks, rounds, ends and preemptions: what is known of a request is its own text.

A small world stands for vLLM's batches. After each step the history of every request that has a row is the end of its
text, and what was looked up followed an earlier occurrence of its last tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from state_machines import run

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import CandidateTable
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.lookup import look_up
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.vllm.lookup_rows import LookupRows

ROWS, WINDOW, VOCABULARY = 4, 24, 3  # row 0 is nobody's
CAPS = Shape(3, 2, 6)
CPU = torch.device("cpu")


class Request:
    """One request: its committed text, and how much of it the target has read."""

    def __init__(self, name: str, text: list[int]) -> None:
        self.name, self.text, self.computed = name, text, 0

    @property
    def in_prompt(self) -> bool:
        """The next step does not give a token yet."""
        return self.computed < len(self.text) - 1


class World(RuleBasedStateMachine):
    """vLLM's requests, as far as `LookupRows` knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = LookupRows(Lookups(ROWS, CAPS, WINDOW, VOCABULARY, CPU), CPU)
        self.running: dict[str, Request] = {}
        self.preempted: list[Request] = []
        self.count = 0

    @property
    def history(self) -> object:
        """Of the device."""
        return self.rows.lookups.history

    @rule(
        text=st.lists(st.integers(-1, VOCABULARY), max_size=2 * WINDOW),
        last=st.integers(0, VOCABULARY - 1),
        from_v2=st.booleans(),
    )
    def join(self, text: list[int], last: int, from_v2: bool) -> None:
        """A request comes; some tokens of its prompt are not of the vocabulary, as of an image."""
        self.count += 1
        text = [*text, last]
        request = Request(f"r{self.count}", text)
        self.running[request.name] = request
        given = SimpleNamespace(
            req_id=request.name, prompt_token_ids=text, prefill_token_ids=None, sampling_params=None
        )
        if from_v2:
            given.prompt_token_ids, given.prefill_token_ids = text[:1], text
        self.rows.begin([given])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request ends."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.rows.forget([name])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A request gives its blocks up: its text is read again later."""
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        request.computed = 0
        self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule(again=st.booleans())
    def resume(self, again: bool) -> None:
        """It comes back; to vLLM's V2 runner as a new request with all its tokens."""
        request = self.preempted.pop(0)
        self.running[request.name] = request
        if again:
            given = SimpleNamespace(
                req_id=request.name, prompt_token_ids=None, prefill_token_ids=list(request.text), sampling_params=None
            )
            self.rows.begin([given])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some of a prompt, or what was looked up and a round over it, for every request."""
        batch = list(self.running.values())
        waits = np.array([one.in_prompt for one in batch])
        rows = self.rows.of([one.name for one in batch], waits)
        lengths = torch.tensor([len(one.text) - 1 for one in batch])
        roots = torch.tensor([one.text[-1] for one in batch])
        b, more = len(batch), CAPS.steps
        table = CandidateTable(
            torch.full((b, 1 + more), -0.5), torch.zeros(b, 1 + more, dtype=torch.int64),
            torch.full((b, 1 + more), -1, dtype=torch.int32),
        )  # fmt: skip
        if data.draw(st.booleans()):
            look_up(self.history, table, 1, CAPS.width, rows, lengths, roots)
            self._check_paths(batch, rows.tolist())
        tokens = torch.randint(0, VOCABULARY, (b, CAPS.steps + 1), generator=torch.Generator().manual_seed(self.count))
        follows = data.draw(st.booleans())
        if follows:
            tokens[:, : CAPS.steps] = self.history.path[rows].long().clamp(0, VOCABULARY - 1)
        counts = torch.tensor([data.draw(st.integers(1, CAPS.steps + 1)) for _ in batch], dtype=torch.int32)
        accepted = Accepted(torch.zeros_like(tokens, dtype=torch.int32), counts, tokens)
        self.rows.lookups.append(rows, lengths, accepted)
        for i, request in enumerate(batch):
            if request.in_prompt:
                request.computed += data.draw(st.integers(1, 9))
                request.computed = min(request.computed, len(request.text) - 1)
            else:
                request.text += tokens[i, : counts[i]].tolist()
                request.computed = len(request.text) - 1

    def _check_paths(self, batch: list[Request], rows: list[int]) -> None:
        for request, row in zip(batch, rows, strict=True):
            start = int(self.history.starts[row])
            if row == 0:
                assert start == -1
            elif start >= 0:
                assert start == len(request.text)
                path = self.history.path[row, : int((self.history.cells[row] >= 0).sum())].tolist()
                places = [i for i in range(2, len(request.text)) if request.text[i - 2 : i] == request.text[-2:]]
                assert any((request.text[i:] + path)[: len(path)] == path for i in places)

    @invariant()
    def rows_are_given_once(self) -> None:
        """Every row is free, or of one request."""
        taken = list(self.rows._rows.values())
        assert sorted(taken + self.rows._free) == list(range(1, ROWS))
        assert set(self.rows._rows) <= {*self.running, *(one.name for one in self.preempted)}

    @invariant()
    def histories_are_right(self) -> None:
        """Of all requests with a row; nobody's row knows nothing."""
        assert int(self.history.ends[0]) == -1
        for request in [*self.running.values(), *self.preempted]:
            if row := self.rows._rows.get(request.name, 0):
                begin, end = int(self.history.begins[row]), int(self.history.ends[row])
                assert end == len(request.text) - 1
                for p in range(max(begin, end - WINDOW + 1), end + 1):
                    wanted = request.text[p] if 0 <= request.text[p] < VOCABULARY else -1
                    assert int(self.history.tokens[row, p % WINDOW]) == wanted


FAULTS = {
    "an ended request keeps its row": (LookupRows, "forget", lambda self, names: None),
    "a row is given without its text": (LookupRows, "begin", lambda self, requests: self.__dict__["_rows"].update(
        {new.req_id: self._free.pop() for new in requests if self._free})),
    "accepted tokens are not noted": (Lookups, "append", lambda self, rows, lengths, accepted: None),
}  # fmt: skip


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.matrix)])
def test_what_is_known_of_a_request_is_its_text(examples: int) -> None:
    run(World, examples)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run(World, 40, shrinks=False)
