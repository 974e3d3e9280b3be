"""Greedy text of draft trees in vLLM is that of plain decoding, for every tree shape and every kind of head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from vllm import LLM
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm_engines import (
    Rounds,
    accept_length,
    chosen_by,
    core,
    counters,
    drafted_shapes,
    engine,
    generate,
    random_shapes,
    rounds,
    runner,
)
from vllm_greedy import Reference, make_prompts, write_heads, write_target

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime import deferred_limit
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm import head_forwards
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.deferred_extend import DeferredTokens
from eagle_plugin.vllm.plugin import _MARK

PROMPTS = make_prompts(24)
LENGTH = 40  # tokens of an answer
# Those whose rounds are counted: vLLM also counts one for a new request of one token, without any drafts of its own.
COUNTED = [i for i, prompt in enumerate(PROMPTS) if len(prompt) > 1][:16]
MOST = 5  # tokens that the deepest tree here can yield


class Models(NamedTuple):
    target: Path
    heads: dict[str, Path]
    answers: list[list[int]]  # LENGTH + MOST tokens of plain decoding to each of PROMPTS
    reference: Reference

    @property
    def expected(self) -> list[list[int]]:
        return [answer[:LENGTH] for answer in self.answers]

    def rounds(self, head: str, shape: tuple[int, int, int]) -> Rounds:
        """Those of the reference decoder for COUNTED."""
        prompts, answers = [PROMPTS[i] for i in COUNTED], [self.answers[i] for i in COUNTED]
        return self.reference.rounds(self.heads[head], prompts, answers, LENGTH, *shape)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("greedy")
    target = write_target(folder)
    heads = write_heads(folder, target)
    with engine(target) as llm:
        answers = generate(llm, PROMPTS, max_tokens=LENGTH + MOST)
    return Models(target, heads, answers, Reference(target, list(heads.values())))


def test_the_responses_vary(models: Models) -> None:
    """Else equality would prove little: a text that repeats itself, or that follows from its last token alone."""
    assert len({tuple(answer) for answer in models.expected}) > 21
    followers: dict[int, set[int]] = {}
    for answer in models.expected:
        for token, following in zip(answer, answer[1:], strict=False):
            followers.setdefault(token, set()).add(following)
    assert sum(len(found) > 1 for found in followers.values()) > 10


class Trees(NamedTuple):
    """An engine with trees, and what it drafts."""

    llm: LLM
    head: str
    shape: tuple[int, int, int]

    def rounds(self) -> Rounds:
        """Those of the engine for COUNTED."""
        before = rounds(self.llm)
        generate(self.llm, [PROMPTS[i] for i in COUNTED], max_tokens=LENGTH)
        return rounds(self.llm, before)


@pytest.fixture(scope="module")
def trees(models: Models, request: pytest.FixtureRequest) -> Iterator[Trees]:
    head, *shape = request.param
    depth, topk, nodes = shape
    with engine(models.target, models.heads[head], depth=depth, topk=topk, nodes=nodes) as llm:
        yield Trees(llm, head, (depth, topk, nodes))


CASES = [
    ("reduced", 3, 4, 16),
    pytest.param(("reduced", 1, 1, 2), marks=pytest.mark.matrix),  # among the random shapes of the first case too
    pytest.param(("full", 2, 4, 8), marks=pytest.mark.matrix),
    ("full", 7, 2, 8),  # its drafts write 12 slots after a request's tokens, more than drafted tokens
    pytest.param(("full", 4, 1, 5), marks=pytest.mark.matrix),
    pytest.param(("reduced", 4, 2, 8), marks=pytest.mark.matrix),
    pytest.param(("eagle2", 2, 2, 4), marks=pytest.mark.matrix),
    pytest.param(("peagle", 5, 3, 16), marks=pytest.mark.matrix),  # test_parallel_heads.py has others
    ("eagle2", 3, 4, 13),
]


@pytest.mark.parametrize("trees", CASES, indirect=True, ids=str, scope="module")
def test_equal_to_plain_decoding(models: Models, trees: Trees) -> None:
    assert generate(trees.llm, PROMPTS, max_tokens=LENGTH) == models.expected
    assert accept_length(trees.llm) > (1.3 if trees.shape[0] == 1 else 1.5)


@pytest.mark.parametrize(
    "trees", [CASES[0], pytest.param(CASES[-1], marks=pytest.mark.matrix)], indirect=True, ids=str, scope="module"
)
def test_equal_to_plain_decoding_whatever_the_shapes(models: Models, trees: Trees) -> None:
    with random_shapes(trees.llm) as counts:
        for _ in range(2):  # enough rounds for every shape
            assert generate(trees.llm, PROMPTS, max_tokens=LENGTH) == models.expected
    assert counts.keys() == set(shapes_within(Shape(*trees.shape))) and min(counts.values()) > 1


@pytest.mark.parametrize("trees", CASES, indirect=True, ids=str, scope="module")
def test_as_many_rounds_as_the_reference_decoder(models: Models, trees: Trees) -> None:
    """What is drafted is right too: a tree that is drafted wrong is accepted less, or by chance more."""
    assert trees.rounds() == models.rounds(trees.head, trees.shape)


@pytest.mark.parametrize("trees", CASES[:1], indirect=True, ids=str, scope="module")
class TestControls:
    """What the tests above must notice."""

    def test_keys_left_where_they_were(self, models: Models, trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CacheGroup, "move_accepted", lambda *_: None)
        found = generate(trees.llm, PROMPTS, max_tokens=LENGTH)
        assert sum(a != b for a, b in zip(found, models.expected, strict=True)) > 5

    def test_drafts_that_see_their_siblings(
        self, models: Models, trees: Trees, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def seeing(requests: Any, lens: Any, ancestors: Any, tail: int) -> head_forwards.TreeRows:
            return original(requests, lens, torch.full_like(ancestors, (1 << tail) - 1), tail)

        original = head_forwards.TreeRows
        monkeypatch.setattr(head_forwards, "TreeRows", seeing)
        before = rounds(trees.llm)
        found = generate(trees.llm, [PROMPTS[i] for i in COUNTED], max_tokens=LENGTH)
        assert found == [models.expected[i] for i in COUNTED]
        assert rounds(trees.llm, before) != models.rounds(trees.head, trees.shape)


class SomePlain(ShapeChooser):
    """Turns of trees and plain rounds; keeps what the head made of its candidates."""

    def __init__(self, caps: Shape) -> None:
        super().__init__(caps, None)
        self.rounds = 0
        self.scores: list[Tensor] = []

    def choose(self, *arguments: Any) -> Shape:
        self.rounds += 1
        return PLAIN if self.rounds % 13 > 4 else self.caps

    def launched(self, shape: Shape, b: int, keys: int, drafts: Drafts, *more: Any) -> ServedRound:
        if drafts.scores is not None:
            self.scores.append(drafts.scores.exp().clone())
        return super().launched(shape, b, keys, drafts, *more)


@pytest.mark.parametrize("chunks", [pytest.param(False, marks=pytest.mark.matrix), True], ids=["whole", "chunks"])
@pytest.mark.parametrize("trees", CASES[:1], indirect=True, ids=str, scope="module")
def test_what_plain_steps_yielded_is_read_before_the_next_tree(
    models: Models, trees: Trees, chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, in chunks too, and plain rounds: the head drafts as if it had read each step's tokens at once."""
    served = runner(trees.llm)
    if chunks:
        monkeypatch.setattr(core(trees.llm).scheduler, "max_num_scheduled_tokens", 24)
    add = DeferredTokens.add

    def candidates(owner: Any = None, name: str = "", value: Any = None) -> Tensor:
        chooser = SomePlain(served._caps)
        with monkeypatch.context() as patched, chosen_by(trees.llm, chooser):
            if owner is not None:
                patched.setattr(owner, name, value)
            for layer in served.drafter._draft_attn_layer_names:  # the blocks still hold what the last call wrote
                served.compilation_config.static_forward_context[layer].kv_cache.zero_()
            answers = generate(trees.llm, [PROMPTS[i] for i in COUNTED], max_tokens=LENGTH)
        assert answers == [models.expected[i] for i in COUNTED]
        return torch.cat([scores.flatten() for scores in chooser.scores])

    def add_and_read(deferred: DeferredTokens, names: list[str], *rows: Any) -> None:
        add(deferred, names, *rows)
        served._read_deferred(names)

    def add_decodes(deferred: DeferredTokens, names: list[str], lens: list[int], *rows: Any) -> None:
        if max(lens) == 1:
            add(deferred, names, lens, *rows)

    wanted = candidates(DeferredTokens, "add", add_and_read)
    few = candidates(deferred_limit, "MOST_BYTES", 40 * served.drafter.hidden_size)  # a few rows
    for found in (candidates(), few, candidates(served, "max_num_tokens", 7)):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    for wrong in (
        candidates(served.drafter, "read_deferred", lambda rows: None),
        candidates(DeferredTokens, "add", add_decodes),  # without the prompts
    ):
        assert wrong.shape != wanted.shape or (wrong - wanted).abs().max() > 5e-3


@pytest.mark.parametrize("policy", [pytest.param("fixed", marks=pytest.mark.matrix), "random"])
def test_asynchronous_scheduling(policy: str, models: Models) -> None:
    """A step has rows for the trees of the shape that the worker wished for earlier, and no others."""
    caps = Shape(3, 4, 16)
    options: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16, "plugin": {"async_scheduling": True}}
    with engine(models.target, models.heads["reduced"], policy=policy, **options) as llm:
        assert type(core(llm).scheduler).__name__ == "AsyncScheduler" and core(llm).batch_queue is not None
        with drafted_shapes(llm) as drafted:
            assert generate(llm, PROMPTS, max_tokens=LENGTH) == models.expected
        per_round = counters(llm)["vllm:spec_decode_num_draft_tokens"] / rounds(llm).count
        if policy == "fixed":
            assert drafted.keys() <= {caps, PLAIN} and per_round > caps.width - 1.5
            assert accept_length(llm) > 1.5
        else:
            assert len(drafted) > 10 and per_round < caps.width - 4
            assert accept_length(llm) > 1.2


plan = AsyncScheduler._update_after_schedule


class OwnScheduler(AsyncScheduler):
    """A user's, which plans steps without a method that the plugin has wrapped."""

    _update_after_schedule = getattr(plan, _MARK, plan)


@pytest.mark.matrix
def test_a_scheduler_of_the_users_own(models: Models) -> None:
    """Theirs serves, and every round has the shape of the caps, for which it makes room."""
    options: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16, "plugin": {"async_scheduling": True}}
    options |= {"policy": "random", "scheduler_cls": OwnScheduler}
    with engine(models.target, models.heads["reduced"], **options) as llm:
        assert type(core(llm).scheduler) is OwnScheduler
        with drafted_shapes(llm) as drafted:
            assert generate(llm, PROMPTS, max_tokens=LENGTH) == models.expected
        assert drafted.keys() <= {Shape(3, 4, 16), PLAIN} and accept_length(llm) > 1.5


@pytest.mark.matrix
@pytest.mark.parametrize("asynchronous", [False, True])
def test_limits_by_the_size_of_the_batch(asynchronous: bool, models: Models) -> None:
    limits = {"num_speculative_tokens_per_batch_size": [[1, 1, 15], [2, 4, 3], [5, 64, 0]]}
    options: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16, "plugin": {"async_scheduling": asynchronous}}
    head = models.heads["reduced"]
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 15} | limits
    with engine(models.target, head, **options, speculative_config=speculative) as llm:
        found = []
        for asked in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
            with drafted_shapes(llm) as drafted:
                assert generate(llm, asked, max_tokens=LENGTH) == models.expected[: len(asked)]
            found.append(drafted.most_common(1)[0][0])
        assert found == [(3, 4, 16), (3, 3, 4), PLAIN]


@pytest.mark.matrix
def test_trees_beside_vllms_chain(models: Models) -> None:
    """The chain of the engine with the same head has the same text, a tree of one branch its rounds, a tree fewer."""
    found = {}
    for name, options in {
        "chain": {"chain": True, "nodes": 4},
        "branch": {"depth": 3, "topk": 1, "nodes": 4},
        "tree": {"depth": 3, "topk": 4, "nodes": 16},
    }.items():
        with engine(models.target, models.heads["reduced"], **options) as llm:
            assert generate(llm, PROMPTS, max_tokens=LENGTH) == models.expected
            found[name] = rounds(llm)
    assert found["branch"] == found["chain"]
    assert found["tree"].count < 0.9 * found["chain"].count
