"""The head reads the tokens of plain rounds later, and then has the state that it would have had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from toy_engine import DRAFT_V, ROWS, SHAPE, TABLE, Drafter, H, V, Verifier

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.policy.costs import DEFERRED_TOKENS
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.deferred_extend import MOST_TOKENS, DeferredTokens, padding_sizes
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.worker import TreeWorker

FEATURES = 3 * H
MORE = 36, DEFERRED_TOKENS + 10  # two forwards, of the second of which one request has no tokens


class Server:
    """Plain rounds of a batch, whose requests begin with given lengths."""

    def __init__(self, lazily: bool) -> None:
        self.drafter, verifier = Drafter(), Verifier()
        self.reader = BatchReader(DEFERRED_TOKENS, ROWS, TABLE, KeyTable(ROWS, "cpu", seed=1))
        self.round = DecodeRound(self.drafter, verifier, self.reader)
        self.deferred = DeferredTokens(ROWS, torch.zeros(FEATURES))
        if lazily:
            self.round.deferred = self.deferred
        self.state: DraftState | None = None

    def schedule(self, rows: list[int], lengths: list[int]) -> Any:
        b = len(rows)
        info = SimpleNamespace(
            temperatures=torch.ones(b, 1), top_ks=torch.ones(b, dtype=torch.int32), top_ps=torch.ones(b),
            min_ps=torch.zeros(b), is_all_greedy=True,
        )  # fmt: skip
        return SimpleNamespace(seq_lens=torch.tensor(lengths), req_pool_indices=torch.tensor(rows), sampling_info=info)

    def plain_round(self, rows: list[int], lengths: list[int], state: DraftState) -> DraftState:
        batch = self.reader.read(PLAIN, self.schedule(rows, lengths), len(rows))
        drafts = self.round.draft(batch, state)
        output = self.round.verify(batch, drafts)
        accepted = self.round.walk(batch, drafts, output)
        return self.round.extend(batch, accepted, output, state)

    def caught_up(self, rows: list[int], lengths: list[int], state: DraftState, longest: int) -> DraftState:
        return self.deferred.read(self.schedule(rows, lengths), self.reader, self.drafter, state, longest)

    def head_rows(self, rows: list[int], lengths: list[int]) -> Tensor:
        """Keys of the head at all committed positions."""
        return torch.cat([self.drafter.model.keys[TABLE[row, :n].long()] for row, n in zip(rows, lengths, strict=True)])


def first_state(b: int) -> DraftState:
    g = torch.Generator().manual_seed(3)
    logp, tokens = torch.randn(b, DRAFT_V, generator=g).log_softmax(1).sort(descending=True)
    top = TopM(logp, tokens)
    return DraftState(HeadState(top, torch.randn(b, H, generator=g)), torch.randint(0, V, (b,), generator=g))


def run(lazily: bool, joins_after: int, rounds: int, missing: int = 0) -> tuple[Server, DraftState, list[int]]:
    """Request 1 decodes `rounds` tokens; request 2 joins after some, with the state of its prefill.

    missing: the last tokens that the head is not given to read.
    """
    server, both = Server(lazily), first_state(2)
    rows, lengths = [3, 7], [9, 14]
    server.deferred.forget(torch.tensor([3]))

    def of(state: DraftState, i: int) -> DraftState:
        head = HeadState(TopM(*(x[i : i + 1] for x in state.head.top)), state.head.hidden[i : i + 1])
        return DraftState(head, state.roots[i : i + 1])

    state = of(both, 0)
    for number in range(rounds):
        if number == joins_after:
            server.deferred.forget(torch.tensor([7]))
            second = of(both, 1)
            top = TopM(*map(torch.cat, zip(state.head.top, second.head.top, strict=True)))
            head = HeadState(top, torch.cat([state.head.hidden, second.head.hidden]))
            state = DraftState(head, torch.cat([state.roots, second.roots]))
        count = 1 if number < joins_after else 2
        state = server.plain_round(rows[:count], lengths[:count], state)
        lengths = [n + (i < count) for i, n in enumerate(lengths)]
    if joins_after == rounds:  # just before the drafted round
        second = of(both, 1)
        top = TopM(*map(torch.cat, zip(state.head.top, second.head.top, strict=True)))
        state = DraftState(
            HeadState(top, torch.cat([state.head.hidden, second.head.hidden])), torch.cat([state.roots, second.roots])
        )
        server.deferred.forget(torch.tensor([7]))
    if lazily:
        assert server.deferred.rounds == rounds
        state = server.caught_up(rows, lengths, state, rounds - missing)
        assert server.deferred.rounds == 0
    return server, state, lengths


@pytest.mark.parametrize(
    ("joins_after", "rounds"), [(0, 1), (0, 5), (2, 6), (4, 4), (1, DEFERRED_TOKENS), (1, DEFERRED_TOKENS + 1), MORE]
)
def test_the_head_is_where_it_would_have_been(joins_after: int, rounds: int) -> None:
    each, wanted, lengths = run(False, joins_after, rounds)
    later, found, _ = run(True, joins_after, rounds)
    assert torch.equal(found.roots, wanted.roots)
    for x, y in zip((*found.head.top, found.head.hidden), (*wanted.head.top, wanted.head.hidden), strict=True):
        width = SHAPE.topk if x.dim() == 2 and x.shape[1] == DRAFT_V else x.shape[1]
        assert torch.allclose(x[:, :width].float(), y[:, :width].float(), rtol=1e-4, atol=1e-4)
    rows = [3, 7]
    assert torch.allclose(later.head_rows(rows, lengths), each.head_rows(rows, lengths), rtol=1e-4, atol=1e-4)


def test_a_state_that_was_not_read_differs() -> None:
    """The control: without reading, the head would go on from where it was."""
    _, wanted, _ = run(False, 0, 5)
    assert not torch.equal(first_state(2).head.hidden, wanted.head.hidden)


def test_a_bound_that_is_too_small_leaves_the_head_behind() -> None:
    """The control of what `DeferredTokens.longest` must be."""
    _, wanted, lengths = run(False, *MORE)
    server, found, _ = run(True, *MORE, missing=10)
    assert not torch.allclose(found.head.hidden[0], wanted.head.hidden[0], rtol=1e-2, atol=1e-2)
    rows = [3, 7]
    assert not torch.allclose(
        server.head_rows(rows, lengths), run(False, *MORE)[0].head_rows(rows, lengths), rtol=1e-2, atol=1e-2
    )


def test_no_request_has_more_tokens_than_the_host_says() -> None:
    """An answer of n tokens, whose first one is the prefill's, has had fewer than n plain rounds."""
    deferred = DeferredTokens(ROWS, torch.zeros(FEATURES))
    requests = [SimpleNamespace(output_ids=[7] * n) for n in (3, 20, 1)]
    deferred.rounds = 100
    assert deferred.longest(requests) == 20 and deferred.longest(requests[:1]) == 3 and deferred.longest([]) == 0
    deferred.rounds = 5  # the head has read since
    assert deferred.longest(requests) == 5
    deferred.rounds, long = 1000, [SimpleNamespace(output_ids=[7] * 900)]
    assert deferred.longest(long) == deferred.most == MOST_TOKENS


def test_slots_beyond_the_committed_tokens_are_not_written() -> None:
    """A request that joined late has fewer tokens than the forward has rows; the slots after them may be another's."""
    server, _, lengths = run(True, 4, 4)
    after = TABLE[7, lengths[1] :].long()
    untouched = Drafter().model.keys[after]
    assert torch.equal(server.drafter.model.keys[after], untouched)
    rewritten = TABLE[3, 9 : lengths[0]].long()
    assert not torch.equal(server.drafter.model.keys[rewritten], Drafter().model.keys[rewritten])


class Sized(Drafter):
    """Notes the requests and the rows of each that the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[tuple[int, int]] = set()

    def extend(self, batch: Any, accepted: Any, *given: Any) -> DraftState:
        self.read.add(tuple(accepted.tokens.shape))
        return super().extend(batch, accepted, *given)


def test_what_the_head_reads_while_serving_has_run_over_padding_before() -> None:
    """Triton has one kernel for all numbers of rows up to the same power of two."""
    server = Server(lazily=True)
    server.drafter = drafter = Sized()
    keys = drafter.model.keys.clone()
    server.deferred.read_padding(server.reader, drafter, most=6)
    prepared, drafter.read = drafter.read, set()
    assert {b for b, _ in prepared} == {1, 2, 4, 6}
    assert torch.equal(drafter.model.keys[1:], keys[1:]), "only the slot of padding is written"
    assert not server.deferred._counts.any()
    for longest in range(1, DEFERRED_TOKENS + 1):
        server.caught_up([3], [20], first_state(1), longest)
    assert drafter.read == {(1, longest) for longest in range(1, DEFERRED_TOKENS + 1)}
    assert {(b, 1 << (rows - 1).bit_length()) for b, rows in drafter.read} <= prepared


def test_a_warm_up_without_memory_ends_nothing() -> None:
    class Small(Sized):
        """It has no memory for more than 64 rows."""

        def extend(self, batch: Any, accepted: Any, *given: Any) -> DraftState:
            if accepted.tokens.numel() > 64:
                raise torch.OutOfMemoryError("no memory")
            return super().extend(batch, accepted, *given)

    server = Server(lazily=True)
    server.drafter = drafter = Small()
    server.deferred.read_padding(server.reader, drafter, most=6)
    assert drafter.read and max(b * tokens for b, tokens in drafter.read) <= 64


@pytest.mark.parametrize("most", [1, 48, 300])
@pytest.mark.parametrize("most_tokens", [5, DEFERRED_TOKENS])
@pytest.mark.parametrize(("heads", "kv_heads", "columns"), [(32, 8, 131072), (32, 32, 131072), (64, 8, 8192)])
def test_every_kernel_of_attention_has_run_over_padding(
    most: int, most_tokens: int, heads: int, kv_heads: int, columns: int
) -> None:
    """Triton compiles another kernel for every number of stretches that a prefix is split into."""
    tiles = pytest.importorskip("eagle_plugin.kernels.triton_tiles", reason="Triton is not installed")

    def kernel(b: int, tokens: int) -> tuple[Any, int]:
        rows = tokens * heads // kv_heads
        tile = tiles.tile_for(rows, 128, 2, hopper=True)
        programs = b * kv_heads * -(-rows // tile.rows)
        return tile, tiles.splits_for(programs, columns, 132, tile, 4 * b * tokens * heads * 128).most

    used = {kernel(b, tokens) for b in range(1, most + 1) for tokens in range(1, most_tokens + 1)}
    assert used == {kernel(b, tokens) for b, tokens in padding_sizes(most, most_tokens)}


@pytest.mark.parametrize(
    ("shape", "longest", "reads"), [(PLAIN, 3, False), (PLAIN, 4, True), (SHAPE, 0, False), (SHAPE, 1, True)]
)
def test_the_head_reads_before_drafts_or_when_a_request_has_many_tokens(shape: Any, longest: int, reads: bool) -> None:
    read = []
    deferred = SimpleNamespace(most=4, read=lambda *given: read.append(given[-1]))
    drafter = SimpleNamespace(relayed=lambda info: None)
    pauses = list[bool]()
    worker: Any = SimpleNamespace(
        _round=SimpleNamespace(deferred=deferred),
        _reader=None,
        _draft_worker=drafter,
        shapes=SimpleNamespace(pause=lambda: pauses.append(True)),
    )
    batch = SimpleNamespace(spec_info=None)
    TreeWorker._caught_up(worker, batch, shape, longest)
    assert read == ([longest] if reads else [])
    assert bool(pauses) == (reads and shape == PLAIN)  # no plain round has this time
