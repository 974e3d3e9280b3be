"""Block drafters (DFlash) with draft trees in vLLM: what they list is what a computation in plain torch lists, greedy
text is that of plain decoding, and sampled text has its distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import pytest
import torch
from bigram_models import bigram_target, spoken
from dflash_models import dflash_head, tiny_dflash
from dflash_reference import DFlashReference
from family_models import family_target
from gtest import p_values
from tiny_models import markov_target, read_markov_map, tiny_llama
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_bigram import OPTIONS, Acceptance, draw
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
from vllm_greedy import make_prompts

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.runtime import accept
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.parallel_levels import Block, HeadLevels
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.round_costs import measure

# ---------------------------------------------------------------------------------------------------------------------
# What is listed

SHAPE = Shape(5, 3, 12)
MATRIX = pytest.mark.matrix  # lists and greedy text run always, the functions of captured steps on fake CUDA
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
            results.append(not (tokens.equal(best.indices) and torch.allclose(logp, best.values, rtol=1e-3, atol=1e-3)))
    return results


@pytest.mark.parametrize("longest", [5, 3 * BUDGET - 9], ids=["read at once", "read in parts"])
def test_lists_are_those_of_the_reference(longest: int, pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = runner(tiny).drafter
    assert runner(tiny)._caps == SHAPE and drafter.levels == HeadLevels(block=Block(2, BLOCK))
    assert drafter.levels.kind is Levels.PARALLEL
    prompt = [3 + 7 * i % 400 for i in range(longest)]
    for _ in range(2):  # the second time a long prompt is in the prefix cache
        found = differing(pair, tiny, prompt, monkeypatch)
        assert len(found) > LENGTH // 2 and not any(found)


@MATRIX  # what differs is the target
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "gemma4_text", "llama4_text"])
def test_lists_with_other_targets(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And greedy text of several requests is that of plain decoding."""
    target = family_target(tmp_path / "target", family)
    head = tiny_dflash(tmp_path / "head", target, block=BLOCK)
    made, prompts = Pair(target, head, DFlashReference(target, head)), [[3 + 7 * i % 400 for i in range(50)], [9, 4]]
    with engine(target) as llm:
        expected = generate(llm, prompts)
    windows: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True} if family not in ("qwen3", "qwen3_moe") else {}
    with engine(target, head, depth=SHAPE.steps, topk=SHAPE.topk, nodes=SHAPE.width, **windows) as llm:
        assert generate(llm, prompts) == expected
        found = differing(made, llm, prompts[0], monkeypatch)
        assert len(found) > LENGTH // 2 and not any(found)


@MATRIX
def test_lists_of_a_causal_drafter(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = tiny_dflash(tmp_path / "head", pair.target, block=BLOCK, is_causal=True)
    made, prompt = Pair(pair.target, head, DFlashReference(pair.target, head)), [3 + 7 * i % 400 for i in range(50)]
    with engine(pair.target, head, depth=SHAPE.steps, topk=SHAPE.topk, nodes=SHAPE.width) as llm:
        found = differing(made, llm, prompt, monkeypatch)
        assert len(found) > LENGTH // 2 and not any(found)
        monkeypatch.setattr(runner(llm).drafter, "_is_causal", False)  # the control
        assert all(differing(made, llm, prompt, monkeypatch))


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


# ---------------------------------------------------------------------------------------------------------------------
# Text

TEXT = 40  # tokens of an answer
WIDTH = 320  # of models: vLLM's norm of the target's states takes multiples of 16 on a CPU
ASKED = make_prompts(20)


class Greedy(NamedTuple):
    target: Path
    head: Path
    expected: list[list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    folder = tmp_path_factory.mktemp("greedy")
    target = bigram_target(folder / "target", vocab=WIDTH, noise=0.02)
    head = dflash_head(folder / "dflash", target, spoken(target), wrong=0.2, layers=4)
    with engine(target) as llm:
        return Greedy(target, head, generate(llm, ASKED, max_tokens=TEXT))


TREES: dict[str, Any] = {"depth": 4, "topk": 3, "nodes": 12}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((4, 3, 12), id="tree"),
        pytest.param((7, 1, 8), marks=MATRIX, id="chain"),
        pytest.param((5, 8, 64), marks=MATRIX, id="64 nodes"),
        pytest.param((1, 1, 2), marks=MATRIX, id="one draft"),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(shape: tuple[int, int, int], models: Greedy) -> None:
    """Whatever the shapes, with a prefix cache and parts of prompts; nothing of a request stays behind."""
    depth, topk, nodes = shape
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": max(90, 8 * nodes)}
    with engine(models.target, models.head, depth=depth, topk=topk, nodes=nodes, **options) as llm:
        free = free_blocks(llm)
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert accept_length(llm) > 1.3
        with random_shapes(llm) as counts:
            assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert len(counts) > 1
        settle(llm)
        assert free_blocks(llm) == free and not runner(llm)._store._found


@MATRIX
def test_aborted_requests_leave_nothing_behind(models: Greedy) -> None:
    with engine(models.target, models.head, **TREES, policy="random") as llm:
        free, server = free_blocks(llm), llm.llm_engine
        for i, prompt in enumerate(ASKED[:8]):
            server.add_request(f"gone {i}", TokensPrompt(prompt_token_ids=prompt), SamplingParams(max_tokens=60))
        for _ in range(6):
            server.step()
        server.abort_request([f"gone {i}" for i in range(8)])
        settle(llm)
        assert free_blocks(llm) == free
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        settle(llm)
        assert free_blocks(llm) == free and not runner(llm)._store._found


@MATRIX  # as with other heads: the drafter reads nothing that the scheduler changes
@pytest.mark.parametrize("policy", ["fixed", "random"])
def test_asynchronous_scheduling(policy: str, models: Greedy) -> None:
    with engine(models.target, models.head, policy=policy, **TREES, plugin={"async_scheduling": True}) as llm:
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert accept_length(llm) > 1.15


@MATRIX  # the same blocks
def test_preemption(models: Greedy) -> None:
    with engine(models.target, models.head, **TREES, policy="random", num_gpu_blocks_override=20) as llm:
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert counters(llm)["vllm:num_preemptions"] > 0


@MATRIX
def test_the_policy_measures_and_chooses(models: Greedy) -> None:
    with engine(models.target, models.head, **TREES, policy="auto") as llm:
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert measure(runner(llm), runner(llm)._caps, budget=1.0).levels is Levels.PARALLEL


@MATRIX
def test_steps_that_are_replayed(models: Greedy, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the graph emulator: the same trees as without graphs."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with recording_launches(), engine(models.target, models.head, **TREES) as llm:
        step = runner(llm)._step
        assert step.sizes() == [8, 4, 2, 1]
        replayed = step.functions.replays
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert step.functions.replays > replayed + 100
        served = rounds(llm)
        runner(llm)._step = None
        assert generate(llm, ASKED, max_tokens=TEXT) == models.expected
        assert rounds(llm, served) == served and served.tokens > 1.3 * served.count


class Markov(NamedTuple):
    target: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    target = markov_target(tmp_path_factory.mktemp("markov") / "target", vocab=WIDTH)
    following = read_markov_map(target)
    prompts = [[3, 50 + i, int(following[50 + i])] for i in range(4)]
    expected = []
    for prompt in prompts:
        text = [prompt[-1]]
        for _ in range(TEXT):
            text.append(int(following[text[-1]]))
        expected.append(text[1:])
    return Markov(target, prompts, expected)


@MATRIX
def test_a_drafter_that_knows_the_target_is_right(
    markov: Markov, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft is accepted; the root is told by the target's state of the token before, so a shift is noticed."""
    kept = sorted(set(read_markov_map(markov.target).tolist()))
    head = dflash_head(tmp_path / "dflash", markov.target, kept, layers=4, by_context=True)
    with engine(markov.target, head, depth=3, topk=2, nodes=8) as llm:
        assert generate(llm, markov.prompts, max_tokens=TEXT) == markov.expected
        assert accept_length(llm) > 3.9
        before = rounds(llm)
        monkeypatch.setattr(runner(llm).drafter, *shifted_context(runner(llm).drafter))
        assert generate(llm, markov.prompts, max_tokens=TEXT) == markov.expected
        after = rounds(llm, before)
        assert after.tokens < 1.5 * after.count


# ---------------------------------------------------------------------------------------------------------------------
# Sampled text

REQUESTS = 800
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {87: 0.8}},
]
LEAST_P = 1e-4 / (6 * 2)  # six views of two settings: a right verifier fails one of these tests once in 10,000 runs


@MATRIX
def test_sampled_text_has_the_distribution_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a verifier that accepts every draft is found out."""
    target = bigram_target(tmp_path / "target", vocab=WIDTH)
    head = dflash_head(tmp_path / "dflash", target, spoken(target), wrong=0.5, layers=4)
    with engine(target, **OPTIONS) as plain:
        theirs = draw(plain, SETTINGS, 2 * REQUESTS)
    with engine(target, head, depth=4, topk=2, nodes=10, policy="random", **OPTIONS) as llm:
        acceptance = Acceptance(llm)
        for setting, ours, wanted in zip(SETTINGS, draw(llm, SETTINGS, REQUESTS), theirs, strict=True):
            found = p_values(ours, wanted)
            assert min(found.values()) > LEAST_P, (setting, found)
        assert acceptance.length > 1.2
        with fixed_shapes(llm):
            alone = [generate(llm, [[60, 70]], temperature=1.0, seed=seed)[0] for seed in (0, 5)]
        assert generate(llm, [[60, 70]] * 4, temperature=1.0, seed=5) == [alone[1]] * 4 != [alone[0]] * 4
        monkeypatch.setattr(accept, "verify_tree", broken_verifier.FAULTS["every draft accepted"])
        found = p_values(draw(llm, SETTINGS[:1], REQUESTS)[0], theirs[0])
        assert min(found.values()) < LEAST_P**2, found
