"""Block drafters (DFlash) with draft trees in vLLM: what they list is what a computation in plain torch lists, greedy
text is that of plain decoding, and sampled text has its distribution."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import pytest
import torch
from bigram_models import spoken
from dflash_models import dflash_head, tiny_dflash
from dflash_reference import DFlashReference
from gtest import p_values
from tiny_models import markov_target, read_markov_map, tiny_llama
from torch import Tensor
from vllm import LLM
from vllm_bigram import OPTIONS, Acceptance, draw, write_models
from vllm_engines import (
    accept_length,
    chosen_by,
    counters,
    engine,
    fixed_shapes,
    free_blocks,
    generate,
    random_shapes,
    rounds,
    runner,
    settle,
)
from vllm_greedy import make_prompts, write_target

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.runtime import round as decode_round
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.parallel_levels import Block, HeadLevels
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm import block_drafts
from eagle_plugin.vllm.head_forwards import DraftBatch

# ---------------------------------------------------------------------------------------------------------------------
# What is listed

SHAPE = Shape(5, 3, 12)
BLOCK = 8
BUDGET = 40  # tokens of a step, of which vLLM keeps 11 per request for its own drafting
LENGTH = 14


class Pair(NamedTuple):
    """A target and a drafter that knows nothing, whose lists so depend on all that it reads."""

    target: Path
    head: Path
    reference: DFlashReference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_llama(folder / "target", head_dim=32)
    head = tiny_dflash(folder / "head", target, block=BLOCK)
    return Pair(target, head, DFlashReference(target, head))


@pytest.fixture(scope="module")
def tiny(pair: Pair) -> Iterator[LLM]:
    trees = {"depth": SHAPE.steps, "topk": SHAPE.topk, "nodes": SHAPE.width}
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": BUDGET, "block_size": 16}
    with engine(pair.target, pair.head, **trees, **options, enable_prefix_caching=True) as llm:
        yield llm


def differing(pair: Pair, llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each tree of an answer, one request alone: whether the lists before it differ from the reference's."""
    drafter, found = runner(llm).drafter, []
    original = drafter.draft_tree

    def kept(batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        assert state.top.logp.shape[1] == batch.shape.steps
        found.append((int(batch.lengths[0]), int(roots[0]), *(values[0].clone() for values in state.top)))
        return original(batch, roots, state)

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "draft_tree", kept)
        text = prompt + generate(llm, [prompt], max_tokens=LENGTH)[0]
    assert all(text[n] == root for n, root, *_ in found if n < len(text))
    results = []
    for n, _, logp, tokens in found:
        if n < len(text):
            wanted = pair.reference.logits(text[: n + 1], BLOCK)[: len(logp)].log_softmax(-1)
            best = wanted.topk(logp.shape[1])
            results.append(
                not (tokens.equal(best.indices) and torch.allclose(logp, best.values, rtol=1e-3, atol=1e-3))
            )
    return results


@pytest.mark.parametrize("longest", [5, 3 * BUDGET - 9], ids=["read at once", "read in parts"])
def test_lists_are_those_of_the_reference(
    longest: int, pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = runner(tiny).drafter
    assert runner(tiny)._caps == SHAPE and drafter.levels == HeadLevels(block=Block(2, BLOCK))
    assert drafter.levels.kind is Levels.PARALLEL
    prompt = [3 + 7 * i % 400 for i in range(longest)]
    for _ in range(2):  # the second time a long prompt is in the prefix cache
        found = differing(pair, tiny, prompt, monkeypatch)
        assert len(found) > LENGTH // 2 and not any(found)


class Turns(ShapeChooser):
    """Two plain rounds of four, which the drafter reads later."""

    rounds = 0

    def choose(self, *arguments: Any) -> Shape:
        self.rounds += 1
        return PLAIN if self.rounds % 4 in (1, 2) else self.caps


def test_lists_after_plain_rounds_are_those_of_the_reference(
    pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3 + 5 * i % 400 for i in range(9)]
    with chosen_by(tiny, Turns(SHAPE, None)):
        found = differing(pair, tiny, prompt, monkeypatch)
    assert len(found) >= 4 and not any(found)
    monkeypatch.setattr(runner(tiny).drafter, "read_deferred", lambda *rows: None)
    for layer in runner(tiny).drafter._draft_attn_layer_names:  # the blocks still hold what the last call wrote
        runner(tiny).compilation_config.static_forward_context[layer].kv_cache.zero_()
    with chosen_by(tiny, Turns(SHAPE, None)):
        assert any(differing(pair, tiny, prompt, monkeypatch))


def causal_block(drafter: Any) -> tuple[str, Any]:
    return "_is_causal", True


def other_mask(drafter: Any) -> tuple[str, Any]:
    return "levels", HeadLevels(block=Block(3, BLOCK))


def shorter_block(drafter: Any) -> tuple[str, Any]:
    return "levels", HeadLevels(block=Block(2, BLOCK - 1))


def shifted_context(drafter: Any) -> tuple[str, Any]:
    store = drafter._store
    return "_store", lambda states, positions, slots: store(states.roll(1, dims=0), positions, slots)


def shifted_positions(drafter: Any) -> tuple[str, Any]:
    store = drafter._store
    return "_store", lambda states, positions, slots: store(states, positions + 1, slots)


@pytest.mark.parametrize("fault", [causal_block, other_mask, shorter_block, shifted_context, shifted_positions])
def test_faults_are_noticed(
    fault: Callable[[Any], tuple[str, Any]], pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each of them changes every list."""
    drafter = runner(tiny).drafter
    assert tiny.reset_prefix_cache()
    monkeypatch.setattr(drafter, *fault(drafter))
    found = differing(pair, tiny, [3, 40, 41, 99], monkeypatch)
    assert len(found) > 3 and all(found)
    monkeypatch.undo()
    assert tiny.reset_prefix_cache()
