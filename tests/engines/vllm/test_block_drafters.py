"""Block drafters (DFlash) with draft trees in vLLM: greedy text is that of plain decoding, and sampled text has its
distribution; test_block_drafter_lists.py compares what they list."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bigram_models import bigram_target, spoken
from dflash_models import dflash_head
from tiny_models import markov_target, read_markov_map
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm_block_faults import shifted_context
from vllm_block_sampling import sampled_as_plain
from vllm_engines import (
    accept_length,
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

from eagle_plugin.core.shape import Levels
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm.round_costs import measure

MATRIX = pytest.mark.matrix  # lists and greedy text run always, the functions of captured steps on fake CUDA
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


@MATRIX
def test_sampled_text_has_the_distribution_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a verifier that accepts every draft is found out."""
    target = bigram_target(tmp_path / "target", vocab=WIDTH)
    head = dflash_head(tmp_path / "dflash", target, spoken(target), wrong=0.5, layers=4)
    with sampled_as_plain(target, head, monkeypatch) as llm:
        with fixed_shapes(llm):
            alone = [generate(llm, [[60, 70]], temperature=1.0, seed=seed)[0] for seed in (0, 5)]
        assert generate(llm, [[60, 70]] * 4, temperature=1.0, seed=5) == [alone[1]] * 4 != [alone[0]] * 4
