"""Penalties after every node of a tree, against the engine's penalizers fed token by token along the path to it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import ancestor_bitmasks, prop, random_parents

pytest.importorskip("sglang")

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.sglang.penalties import NodePenalties, penalised

VOCAB = 40
EOS, EXTRA_STOP, MODEL_STOP, REQUEST_STOP = 7, 11, 13, 17
STOPS = {EOS, EXTRA_STOP, MODEL_STOP}
# Multiples of 1/8, so that the engine's sums of penalties and our products are the same numbers.
STRENGTHS = {
    "none": {},
    "frequency": {"frequency_penalty": 0.625},
    "presence": {"presence_penalty": -1.25},
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.7, "frequency_penalty": -0.5},
    "all": {"frequency_penalty": 0.375, "presence_penalty": 0.5, "repetition_penalty": 1.7, "min_new_tokens": 6},
    "length": {"min_new_tokens": 9, "stop_token_ids": {REQUEST_STOP}},
}


class Batch:
    """What penalizers read of a ``ScheduleBatch`` (they hold it by a weak reference)."""

    def __init__(self, reqs: list[Req]) -> None:
        self.reqs, self.device = reqs, "cpu"
        self.sampling_info = SimpleNamespace(acc_additive_penalties=None, acc_scaling_penalties=None)
        self.req_pool_indices = torch.tensor([req.req_pool_idx for req in reqs])

    def round(self) -> SimpleNamespace:
        """What penalties read of a ``RoundBatch`` whose requests have this output; the last token has no key yet."""
        lengths = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in self.reqs]
        return SimpleNamespace(requests=self.req_pool_indices, prefix_lens=torch.tensor(lengths))


def started(reqs: list[Req]) -> NodePenalties:
    """Penalties after the prefill of requests that have their output already."""
    for row, req in enumerate(reqs, start=1):
        req.req_pool_idx = row
    penalties = NodePenalties(len(reqs) + 1, VOCAB, "cpu")
    penalties.start(Batch(reqs))
    return penalties


def inside_a_forward(reqs: list[Req]) -> Batch:
    """A batch with what the engine has accumulated for its forward."""
    batch = Batch(reqs)
    batch.sampling_info = engine_info(batch).copy_for_forward()
    return batch


def request(output: list[int] | torch.Tensor, **parameters) -> Req:
    made = Req("name", "", array("q", [1, 2, 3]), SamplingParams(**parameters), eos_token_ids={MODEL_STOP})
    made.tokenizer = SimpleNamespace(additional_stop_token_ids={EXTRA_STOP}, eos_token_id=EOS)
    made.output_ids = array("q", [int(token) for token in output])
    return made


def engine_info(batch: Batch) -> SamplingBatchInfo:
    """The engine's sampling info of fresh requests."""
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
    }
    ones = torch.ones(len(batch.reqs))
    return SamplingBatchInfo(
        temperatures=ones[:, None],
        top_ps=ones,
        top_ks=ones.int(),
        min_ps=ones,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        penalizer_orchestrator=penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, kinds),
    )


def engine_logits(req: Req, generated: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits [V] after these tokens, by the engine: one call per token, then its own transforms."""
    batch = Batch([req])
    info = engine_info(batch)
    for token in generated:
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits = logits.clone()[None]
    with torch.compiler.set_stance("force_eager"):  # the engine compiles its repetition penalty
        info.copy_for_forward()._apply_pre_grammar_logits_transforms(logits)
    return logits[0]


def make_tree(parents: torch.Tensor, tokens: torch.Tensor) -> DraftTree:
    bitmasks = ancestor_bitmasks(parents)
    bits = torch.arange(parents.shape[1])
    depths = ((bitmasks[:, :, None] >> bits) & 1).sum(2) - 1
    return DraftTree(tokens, parents, depths.int(), bitmasks)


def path_tokens(tree: DraftTree, i: int, node: int) -> list[int] | None:
    """The draft tokens from the root's child to the node; None for padding and what hangs below it."""
    found: list[int] = []
    while node > 0:
        found.insert(0, int(tree.tokens[i, node]))
        node = int(tree.parents[i, node])
    return found if node == 0 else None


def check(batch: Batch, tree: DraftTree, logits: torch.Tensor, penalties: NodePenalties) -> None:
    """Apply the penalties and compare every node that can be reached."""
    b, width = tree.tokens.shape
    before = logits.clone()
    if penalised(batch):
        penalties.apply(batch.round(), tree, logits)
    for i, req in enumerate(batch.reqs):
        for node in range(width):
            path = path_tokens(tree, i, node)
            if path is not None:
                row = i * width + node
                wanted = engine_logits(req, [*req.output_ids, *path], before[row])
                assert torch.equal(logits[row], wanted), (i, node, req.sampling_params)


@prop
@given(
    st.integers(0, 2**31),
    st.lists(st.sampled_from(sorted(STRENGTHS)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 10),
)
def test_every_node_is_penalised_as_the_engine_would_after_its_path(seed, names, width, output_length):
    """Few tokens, so that paths repeat themselves, the output, and each other; logits of both signs."""
    gen = torch.Generator().manual_seed(seed)
    b = len(names)
    tokens = torch.randint(0, 6, (b, width), generator=gen) * 3 + 1  # EOS and MODEL_STOP are among them
    parents = random_parents(b, width, gen)
    reqs = []
    for i, name in enumerate(names):
        output = torch.randint(0, 6, (output_length,), generator=gen) * 3 + 1
        output[-1] = tokens[i, 0]
        reqs.append(request(output, **STRENGTHS[name]))
    penalties = started(reqs)
    batch, logits = inside_a_forward(reqs), torch.randn(b * width, VOCAB, generator=gen) * 3
    assert penalised(batch) == any(
        set(STRENGTHS[name]) - {"min_new_tokens", "stop_token_ids"}
        or STRENGTHS[name].get("min_new_tokens", 0) > output_length
        for name in names
    )
    check(batch, make_tree(parents, tokens), logits, penalties)


def test_without_penalties_no_request_is_looked_at() -> None:
    """A round is prepared on the host; the engine knows already whether any request of the batch has penalties."""

    class Unread:
        def __getattr__(self, name: str) -> None:
            raise AssertionError("it is looked at")

    plain, penalties = [request([5])], [request([5], presence_penalty=0.5)]
    for reqs in (plain, penalties):
        started(reqs)
    batch = inside_a_forward(plain)
    batch.reqs = [Unread()]
    assert not penalised(batch)
    others = inside_a_forward(penalties)
    others.reqs = batch.reqs
    with pytest.raises(AssertionError, match="it is looked at"):
        penalised(others)


def test_rounds_of_several_tokens_are_counted_as_they_come():
    """Requests that change places, and a row that another request takes over."""
    gen = torch.Generator().manual_seed(0)
    reqs = [request([i], **STRENGTHS["all"]) for i in range(3)]
    penalties = started(reqs)
    for number in range(6):
        present = [reqs[0], *reqs[1:][:: -1 if number % 2 else 1]] if number != 3 else [reqs[2]]
        tokens = torch.randint(0, VOCAB, (len(present), 5), generator=gen)
        tokens[:, 0] = torch.tensor([req.output_ids[-1] for req in present])
        tree = make_tree(random_parents(len(present), 5, gen), tokens)
        batch = inside_a_forward(present)
        check(batch, tree, torch.randn(len(present) * 5, VOCAB, generator=gen), penalties)
        new = torch.randint(0, VOCAB, (len(present), 4), generator=gen)
        lengths = torch.randint(1, 5, (len(present),), generator=gen, dtype=torch.int32)
        penalties.count(batch.round(), Accepted(new.int(), lengths, new))
        for req, row, length in zip(present, new.tolist(), lengths.tolist(), strict=True):
            req.output_ids.extend(row[:length])
        if number == 4:
            row, reqs[1] = reqs[1].req_pool_idx, request([], **STRENGTHS["reward"])
            reqs[1].req_pool_idx = row
            penalties.start(Batch([reqs[1]]))
            penalties.count_prefill(Batch([reqs[1]]), torch.tensor([5], dtype=torch.int32))
            reqs[1].output_ids.append(5)


def test_what_the_host_knows_late_changes_nothing():
    """Under overlap scheduling ``output_ids`` lacks the last round: only the device's counts are used."""
    gen = torch.Generator().manual_seed(3)
    reqs = [request([1, 2, 3], **STRENGTHS["all"])]
    penalties, tree = (
        started(reqs),
        make_tree(random_parents(1, 5, gen), torch.randint(0, VOCAB, (1, 5), generator=gen)),
    )
    logits = torch.randn(5, VOCAB, generator=gen)
    on_time, late, now = logits.clone(), logits.clone(), Batch(reqs).round()
    penalties.apply(now, tree, on_time)
    reqs[0].output_ids = array("q", [1])
    penalties.apply(now, tree, late)
    assert torch.equal(on_time, late) and not torch.equal(late, logits)


def test_a_minimal_length_holds_at_every_depth():
    """A chain over the length that is still missing: stop tokens are impossible before it, untouched after it."""
    width, missing = 8, 4
    req = request([3, 4], min_new_tokens=2 + missing, stop_token_ids={REQUEST_STOP})
    chain = torch.arange(-1, width - 1, dtype=torch.int32)[None]
    logits = torch.zeros(width, VOCAB)
    started([req]).apply(Batch([req]).round(), make_tree(chain, torch.full((1, width), 4)), logits)
    forbidden = logits == -torch.inf
    assert forbidden.sum(dim=1).tolist() == [4] * missing + [0] * (width - missing)
    assert set(forbidden[0].nonzero().flatten().tolist()) == STOPS | {REQUEST_STOP}
    assert not bool(logits[~forbidden].any())


def test_more_stop_tokens_than_places():
    """A request with many of them widens the table; those of the requests before it stay."""
    few, many = request([3], min_new_tokens=3), request([3], min_new_tokens=3, stop_token_ids=set(range(20, 35)))
    penalties = started([few, many])
    logits = torch.zeros(2, VOCAB)
    tree = make_tree(torch.full((2, 1), -1, dtype=torch.int32), torch.full((2, 1), 3))
    penalties.apply(Batch([few, many]).round(), tree, logits)
    forbidden = [set(row.nonzero().flatten().tolist()) for row in logits == -torch.inf]
    assert forbidden == [STOPS, STOPS | set(range(20, 35))]


def test_requests_without_penalties_keep_their_logits_to_the_bit():
    """An infinity or a NaN would not survive a subtraction of zero and a product with one as it is."""
    reqs = [request([4]), request([4], **STRENGTHS["all"]), request([4])]
    logits = torch.full((3, VOCAB), -0.0)
    logits[:, 1] = torch.inf
    before = logits.clone()
    tree = make_tree(torch.full((3, 1), -1, dtype=torch.int32), torch.full((3, 1), 4))
    started(reqs).apply(Batch(reqs).round(), tree, logits)
    untouched = [0, 2]
    assert torch.equal(logits[untouched].view(torch.int32), before[untouched].view(torch.int32))
    assert not torch.equal(logits[1], before[1])


@pytest.mark.parametrize("name", sorted(STRENGTHS))
def test_a_resumed_request_is_penalised_after_its_prefill(name):
    """The engine starts a retracted request with empty counts; a request beside it is new."""
    gen = torch.Generator().manual_seed(2)
    reqs = [request([], **STRENGTHS["all"]), request([4, 4, 9, 4], **STRENGTHS[name])]
    penalties = started(reqs)
    batch = Batch(reqs)
    logits = torch.randn(2, VOCAB, generator=gen)
    batch.sampling_info = engine_info(batch).copy_for_forward()
    wanted = [engine_logits(req, list(req.output_ids), row) for req, row in zip(batch.reqs, logits, strict=True)]
    forgotten = logits.clone()
    with torch.compiler.set_stance("force_eager"):
        batch.sampling_info._apply_pre_grammar_logits_transforms(forgotten)
        penalties.start(batch)
        batch.sampling_info._apply_pre_grammar_logits_transforms(logits)
    assert torch.equal(logits, torch.stack(wanted))
    assert torch.equal(forgotten[0], wanted[0])
    assert torch.equal(forgotten[1], wanted[1]) == (name in ("none", "length"))
