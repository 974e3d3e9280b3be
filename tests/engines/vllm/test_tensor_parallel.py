"""Two ranks of vLLM's tensor parallelism on a CPU (gloo) give the text of one, whatever happens to one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bigram_models
import pytest
import torch
from family_models import family_head, family_target
from tiny_adapters import write_adapter
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.request import LoRARequest
from vllm_bigram import ASYNC, PROMPT, PROMPTS, TREES, Acceptance, ask, tokens
from vllm_engines import core, engine, generate
from vllm_requests import make_prompts

HEADS = 10  # of target and head, which ranks divide
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5},
]
CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
CAPTURED: dict[str, Any] = ASYNC | {"policy": "fixed"}  # few shapes have graphs
# Not GPT-OSS: vLLM's experts with biases do not divide by ranks on a CPU ("No Unquantized MoE backend supports ..").
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "gemma3_text", "llama4_text")


class Models(NamedTuple):
    target: Path
    head: Path


class Spoken(NamedTuple):
    greedy: list[list[int]]
    seeded: list[list[int]]


def speak(llm: LLM) -> Spoken:
    return Spoken(tokens(ask(llm, PROMPTS, [{}] * len(PROMPTS))), speak_seeded(llm))


def speak_seeded(llm: LLM) -> list[list[int]]:
    settings = [one | {"seed": seed} for one in SETTINGS for seed in range(2)]
    return tokens(ask(llm, [PROMPT] * len(settings), settings))


def in_ranks(llm: LLM, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function of vLLM's worker returns in each rank; it is sent there, with what it refers to."""
    return core(llm).model_executor.collective_rpc(function, args=arguments)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    target = bigram_models.bigram_target(folder / "target", heads=HEADS, noise=0.02)
    return Models(target, bigram_models.bigram_eagle3_head(folder / "head", target, wrong=0.3))


@pytest.fixture(scope="module")
def expected(models: Models) -> Spoken:
    """What one rank says with trees; greedily also without."""
    with engine(models.target) as llm:
        plain = tokens(ask(llm, PROMPTS, [{}] * len(PROMPTS)))
    with engine(models.target, models.head, **TREES) as llm:
        spoken = speak(llm)
    assert spoken.greedy == plain and len({tuple(one) for one in spoken.greedy + spoken.seeded}) == 14
    return spoken


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    """vLLM binds a rank to cores; by itself it wants a NUMA node for each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[-1]}")
        yield


@pytest.fixture(scope="module")
def llm(models: Models, expected: Spoken, two_ranks: None) -> Iterator[LLM]:
    with engine(models.target, models.head, **TREES, **TWO_RANKS, policy="auto") as served:
        in_ranks(served, watch_rank)
        yield served


def watch_rank(worker: Any) -> None:
    """Count the rounds in which a rank walked another path than it leaves with, and apply its faults."""
    from eagle_plugin.runtime import accept

    runner = worker.worker.model_runner
    ranks, rank = runner._verifier.ranks, get_tp_group().rank_in_group
    healthy_walk, healthy_agree = accept.verify_tree, ranks.agree
    ranks.splits, ranks.faults = 0, []

    def walk(tree: Any, logits: Any, params: Any, rng_keys: Any, *more: Any, **options: Any) -> Any:
        skewed = rng_keys + 37 if rank == 1 and "skewed" in ranks.faults else rng_keys
        return healthy_walk(tree, logits, params, skewed, *more, **options)

    def agree(accepted: Any) -> Any:
        if "alone" in ranks.faults:
            return accepted
        walked = [values.clone() for values in accepted]
        agreed = healthy_agree(accepted)
        ranks.splits += not all(torch.equal(*values) for values in zip(walked, agreed, strict=True))
        return agreed

    accept.verify_tree, ranks.agree = walk, agree


def choose_faults(worker: Any, *faults: str) -> None:
    worker.worker.model_runner._verifier.ranks.faults = faults


def take_splits(worker: Any) -> int:
    ranks = worker.worker.model_runner._verifier.ranks
    found, ranks.splits = ranks.splits, 0
    return int(found)


def rounds_by_shape(worker: Any) -> dict[str, int]:
    return {str(shape): found.rounds for shape, found in worker.worker.model_runner._shapes.chooser.totals.items()}


def choose_at_random(worker: Any) -> None:
    from eagle_plugin.vllm.shapes import RoundShapes, without_costs

    runner = worker.worker.model_runner
    runner._shapes = RoundShapes(without_costs(runner._caps, "random"))


def test_text_of_two_ranks_is_that_of_one(llm: LLM, expected: Spoken) -> None:
    """With shapes chosen by costs that all ranks share, then with shapes that change every round."""
    accepted = Acceptance(llm)
    assert speak(llm) == expected
    assert accepted.length > 1.4, "hardly a draft was accepted: this says little about trees"
    in_ranks(llm, choose_at_random)
    assert speak(llm) == expected
    first, second = in_ranks(llm, rounds_by_shape)
    assert first == second and len(first) > 3
    assert in_ranks(llm, take_splits) == [0, 0], "a rank walked another path and was corrected"


def test_requests_without_seeds_are_walked_alike(llm: LLM) -> None:
    drawn = [tokens(ask(llm, [PROMPT] * 6, SETTINGS * 2)) for _ in range(2)]
    assert len({tuple(one) for batch in drawn for one in batch}) == 12
    assert in_ranks(llm, take_splits) == [0, 0]


def test_a_rank_that_walks_differently_follows_the_first(llm: LLM, expected: Spoken) -> None:
    """The control: without the broadcast the text is another one."""
    in_ranks(llm, choose_faults, "skewed")
    assert speak_seeded(llm) == expected.seeded
    zero, one = in_ranks(llm, take_splits)
    assert zero == 0 and one > 2, "rank 1 did not walk differently"
    in_ranks(llm, choose_faults)
    assert speak_seeded(llm) == expected.seeded and in_ranks(llm, take_splits) == [0, 0]
    in_ranks(llm, choose_faults, "skewed", "alone")
    assert seeded(llm) != expected.seeded


def seeded(llm: LLM) -> list[list[int]] | None:
    """The text with seeds; None if vLLM ended: ranks with other trees may wait for messages of other sizes."""
    try:
        return speak_seeded(llm)
    except RuntimeError:
        return None


def capture_again(worker: Any) -> None:
    worker.worker.model_runner.capture_steps()


def replays_of(worker: Any) -> int:
    return int(worker.worker.model_runner._step.functions.replays)


@pytest.mark.matrix  # another engine of two ranks; beside test_text_of_two_ranks_is_that_of_one and test_graphs.py
def test_captured_steps(models: Models, expected: Spoken, two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks send each other is replayed with the rest."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with engine(models.target, models.head, **TREES, **TWO_RANKS, **CAPTURED) as served:
        assert speak(served) == expected
        zero, one = in_ranks(served, replays_of)
        assert zero == one > 100


@pytest.mark.matrix
def test_captured_steps_take_the_paths_of_the_first_rank(
    models: Models, expected: Spoken, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the broadcast in the graphs the text is another one."""
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with engine(models.target, models.head, **TREES, **TWO_RANKS, **CAPTURED) as served:
        in_ranks(served, watch_rank)
        for faults, is_same in ((("skewed",), True), (("skewed", "alone"), False)):
            in_ranks(served, choose_faults, *faults)
            in_ranks(served, capture_again)
            assert (seeded(served) == expected.seeded) is is_same, faults


@pytest.mark.matrix
def test_compiled_models(models: Models, expected: Spoken, two_ranks: None) -> None:
    with engine(models.target, models.head, **TREES, **TWO_RANKS, enforce_eager=False) as served:
        assert speak(served) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["random", "auto"])
def test_asynchronous_scheduling(policy: str, models: Models, expected: Spoken, two_ranks: None) -> None:
    """Each rank wishes for shapes of its own, by times of its own; all draft those of the steps."""
    with engine(models.target, models.head, **TREES, **TWO_RANKS, **ASYNC | {"policy": policy}) as served:
        assert speak(served) == expected
        zero, one = in_ranks(served, rounds_by_shape)
        assert zero == one and (policy == "auto" or len(zero) > 3)


@pytest.mark.matrix
def test_requests_with_an_adapter(models: Models, tmp_path: Path, two_ranks: None) -> None:
    """The text of the same ranks without trees. Each has a part of the adapter, as of the target."""
    adapter = LoRARequest("twist", 1, str(write_adapter(tmp_path / "adapter", models.target)))
    options: dict[str, Any] = TWO_RANKS | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}

    def answers(llm: LLM, of: LoRARequest | None) -> list[list[int]]:
        greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        return tokens(llm.generate(PROMPTS, greedy, lora_request=of, use_tqdm=False))

    with engine(models.target, **options) as llm:
        plain, without = answers(llm, adapter), answers(llm, None)
    assert sum(a != b for a, b in zip(plain, without, strict=True)) > len(PROMPTS) // 2
    with engine(models.target, models.head, **TREES, **options, policy="random") as llm:
        accepted = Acceptance(llm)
        assert answers(llm, adapter) == plain
        assert accepted.length > 1.03
        accepted = Acceptance(llm)
        assert answers(llm, None) == without
        assert accepted.length > 1.2


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_other_families(family: str, tmp_path: Path, two_ranks: None) -> None:
    target, prompts = family_target(tmp_path / "target", family), make_prompts(24)
    # vLLM takes EAGLE-3 heads of no Gemma 3.
    head = family_head(tmp_path / "head", target, "eagle2" if family == "gemma3_text" else "eagle3")
    with engine(target, **TWO_RANKS) as plain:
        expected = generate(plain, prompts)
    with engine(target, head, **TREES, **TWO_RANKS) as served:
        assert generate(served, prompts) == expected
