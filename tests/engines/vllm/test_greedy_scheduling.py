"""Greedy text of draft trees is that of plain decoding whatever the scheduler does: chunks, cut trees, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained_heads import rewrite
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engines import chosen_by, counters, engine, generate, requests_of, rounds, runner
from vllm_greedy import GreedyModels, make_prompts, write_models

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.runtime.round import Drafts

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
PROMPTS = [*make_prompts(8, longest=150), *(prompt[:6] for prompt in make_prompts(12, seed=9))]
MATRIX = pytest.mark.matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GreedyModels:
    return write_models(tmp_path_factory.mktemp("scheduling"), PROMPTS)


@pytest.mark.parametrize(
    ("asynchronous", "policy"),
    [
        pytest.param(False, "fixed", marks=MATRIX),
        pytest.param(True, "fixed", marks=MATRIX),
        (True, "random"),
    ],
)
def test_chunks_and_cut_trees(models: GreedyModels, asynchronous: bool, policy: str) -> None:
    """Eight trees want 128 rows per step; what is left of 40 goes to the last tree, or to a part of a prompt."""
    plugin = {"async_scheduling": asynchronous}
    with engine(
        models.target, models.heads["reduced"], policy=policy, **TREES, plugin=plugin, max_num_batched_tokens=40
    ) as llm:
        assert generate(llm, PROMPTS) == models.expected
        drafted = counters(llm)["vllm:spec_decode_num_draft_tokens"] / rounds(llm).count
        assert drafted < TREES["nodes"] - 2  # trees were cut short; at random shapes many are small


def test_a_request_longer_than_the_head_serves(models: GreedyModels, tmp_path: Path) -> None:
    """vLLM asks for no drafts then, and would have zeros verified in their place, of every request of the batch."""
    head = rewrite(
        models.heads["reduced"], tmp_path / "short", config=lambda config: config | {"max_position_embeddings": 128}
    )
    short, long = (choose(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i])) for choose in (min, max))
    assert len(PROMPTS[short]) < 100 and len(PROMPTS[long]) > 128
    with engine(models.target, head, **TREES) as llm:
        drafted = []
        for asked in ([short], [short, long]):
            assert generate(llm, [PROMPTS[i] for i in asked]) == [models.expected[i] for i in asked]
            drafted.append(counters(llm)["vllm:spec_decode_num_draft_tokens"])
    assert drafted[0] > 0 and drafted[1] == drafted[0]


class PlainFirst(ShapeChooser):
    """Drafts the caps after so many plain rounds, and keeps what the head made of its candidates."""

    def __init__(self, caps: Shape, plain: int) -> None:
        super().__init__(caps, None)
        self._plain, self.scores = plain, list[Tensor]()

    def choose(self, *arguments: Any) -> Shape:
        self._plain -= 1
        return PLAIN if self._plain >= 0 else super().choose(*arguments)

    def launched(self, shape: Shape, b: int, keys: int, drafts: Drafts, *more: Any) -> ServedRound:
        if shape != PLAIN:
            assert drafts.scores is not None
            self.scores.append(drafts.scores.exp().clone())
        return super().launched(shape, b, keys, drafts, *more)


def test_beside_a_request_longer_than_the_head_serves(models: GreedyModels, tmp_path: Path) -> None:
    """The head reads what it does not draft for: when the long one has ended, the drafts are those of plain rounds."""
    head = rewrite(
        models.heads["reduced"], tmp_path / "short", config=lambda config: config | {"max_position_embeddings": 128}
    )
    short, long = (choose(PROMPTS, key=len) for choose in (min, max))
    found = []
    with engine(models.target, head, **TREES) as llm:
        for beside, plain in ((False, 10), (True, 0)):
            chooser = PlainFirst(runner(llm)._caps, plain)
            with chosen_by(llm, chooser):
                for prompt, tokens in [(short, 40), *([(long, 10)] if beside else [])]:
                    settings = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                    llm.llm_engine.add_request(str(tokens), TokensPrompt(prompt_token_ids=prompt), settings)
                while llm.llm_engine.has_unfinished_requests():
                    llm.llm_engine.step()
            found.append(chooser.scores)
    alone, mixed = found
    assert len(alone) == len(mixed) > 8
    for one, other in zip(alone, mixed, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, id="sync"), pytest.param(True, id="async", marks=MATRIX)])
def test_preemption(models: GreedyModels, asynchronous: bool) -> None:
    """A cache too small for eight requests: some are thrown out in the middle and start again later."""
    plugin = {"async_scheduling": asynchronous}
    with engine(
        models.target, models.heads["reduced"], policy="random", **TREES, plugin=plugin, num_gpu_blocks_override=20
    ) as llm:
        assert generate(llm, PROMPTS) == models.expected
        assert counters(llm)["vllm:num_preemptions"] > 5
        assert not runner(llm)._store._found.keys() - requests_of(llm)
