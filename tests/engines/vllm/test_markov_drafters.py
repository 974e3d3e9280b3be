"""Block drafters with a Markov head (DSpark) with draft trees in vLLM, which has none for its V1 model runner.

Trees are those of the reference, greedy text is that of plain decoding, sampled text has its distribution. Of what a
drafter reads, test_block_drafters.py and test_block_drafter_lists.py have the rest.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bigram_models import bigram_target, spoken
from draft_paths import paths_of
from dspark_models import dspark_head, tiny_dspark
from reference_decoder import draft_tree
from tiny_models import markov_target, read_markov_map, tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm_block_sampling import sampled_as_plain
from vllm_engines import accept_length, engine, generate, random_shapes, rounds, runner
from vllm_greedy import make_prompts

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.parallel_levels import Block
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.round_costs import measure

MATRIX = pytest.mark.matrix
SHAPE = Shape(5, 3, 16)
TREES: dict[str, Any] = {"depth": SHAPE.steps, "topk": SHAPE.topk, "nodes": SHAPE.width}
BLOCK, WIDTH, LENGTH, TEXT = 6, 320, 14, 40
PROMPTS = [[3 + 7 * i % 400 for i in range(50)], [9, 4]]


class Pair(NamedTuple):
    """A target and a drafter that knows nothing, whose trees so depend on all that it reads."""

    target: Path
    head: Path
    model: Any  # both in transformers and in our modules
    module: Any

    def wanted(self, text: list[int]) -> set[tuple[int, ...]]:
        """The nodes of the reference's tree after a text."""
        greedy, key = SamplingParams.greedy(1), torch.zeros(1, dtype=torch.int64)
        with torch.no_grad():
            drafted = draft_tree(self.model, self.module, text, greedy, key, SHAPE)
        return set(paths_of(Drafts(drafted, SHAPE), 0))


def random_pair(folder: Path, **options: Any) -> Pair:
    target = tiny_llama(folder / "target", head_dim=32)
    head = tiny_dspark(folder / "head", target, block=BLOCK, **options)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return Pair(target, head, model, load_any_head(head, target))


def differing(pair: Pair, llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each tree of an answer, one request alone: whether it is another than the reference's."""
    drafter, found = runner(llm).drafter, []
    original = drafter.draft_tree

    def kept(batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        assert state.hidden.shape[:2] == (len(roots), SHAPE.steps)
        drafts = original(batch, roots, state)
        found.append((int(batch.lengths[0]), set(paths_of(drafts, 0))))
        return drafts

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "draft_tree", kept)
        text = prompt + generate(llm, [prompt], max_tokens=LENGTH)[0]
    return [nodes != pair.wanted(text[: n + 1]) for n, nodes in found if n < len(text)]


def check_trees(pair: Pair, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Trees, greedy text, and the controls: the bias of the root for all nodes, and the rows one level off."""
    with engine(pair.target) as llm:
        expected = generate(llm, PROMPTS, max_tokens=LENGTH)
    with engine(pair.target, pair.head, **TREES) as llm:
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == expected
        drafter = runner(llm).drafter
        block, after = drafter.levels.block, drafter.levels.after
        assert block == Block(2, BLOCK, first) and drafter.levels.kind is Levels.PARALLEL
        found = differing(pair, llm, PROMPTS[0], monkeypatch)
        assert len(found) > LENGTH // 2 and not any(found)

        def of_first(states: Tensor, tokens: Tensor) -> Tensor:
            return after(states, tokens[:, :1].expand_as(tokens))

        def of_nobody(states: Tensor, tokens: Tensor) -> Tensor:
            return drafter._logits(states)[:, None].expand(-1, tokens.shape[1], -1)

        moved = block._replace(first=1 - first, rows=block.rows + 1)
        for fault in ({"after": of_first}, {"after": of_nobody}, {"block": moved}):
            with monkeypatch.context() as patched:
                patched.setattr(drafter, "levels", drafter.levels._replace(**fault))
                found = differing(pair, llm, PROMPTS[1], monkeypatch)
                assert len(found) > 3 and all(found), fault
                assert generate(llm, PROMPTS, max_tokens=LENGTH) == expected


def test_trees_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trees(random_pair(tmp_path), monkeypatch, first=0)


@MATRIX  # what differs is a row, a mask or a table
@pytest.mark.parametrize("case", ["fill-in", "causal", "draft vocabulary", "confidence head"])
def test_trees_of_other_drafters(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, dict[str, Any]] = {
        "fill-in": {"anchor": False},
        "causal": {"is_causal": True},
        "draft vocabulary": {"kept": list(range(3, 515, 2))[:250]},
        "confidence head": {"confidence": True},
    }
    check_trees(random_pair(tmp_path, **options[case]), monkeypatch, first=int(case == "fill-in"))


@MATRIX
def test_steps_that_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the graph emulator: the same trees, of the same text, as without graphs."""
    pair = random_pair(tmp_path)
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with recording_launches(), engine(pair.target, pair.head, **TREES) as llm:
        step = runner(llm)._step
        replayed = step.functions.replays
        expected = generate(llm, PROMPTS, max_tokens=LENGTH)
        served = rounds(llm)
        assert step.functions.replays > replayed + 20
        runner(llm)._step = None
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == expected
        assert rounds(llm, served) == served


class Known(NamedTuple):
    target: Path
    head: Path


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A drafter whose Markov head knows the target nearly, and whose layers say nothing."""
    folder = tmp_path_factory.mktemp("known")
    target = bigram_target(folder / "target", vocab=WIDTH, noise=0.02)
    return Known(target, dspark_head(folder / "dspark", target, spoken(target), wrong=0.2))


@MATRIX
@pytest.mark.parametrize("setting", ["random shapes", "asynchronous", "costs"])
def test_greedy_text_is_that_of_plain_decoding(setting: str, known: Known) -> None:
    asked = make_prompts(20)
    with engine(known.target) as llm:
        expected = generate(llm, asked, max_tokens=TEXT)
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 140}
    if setting == "asynchronous":
        options = {"policy": "random", "plugin": {"async_scheduling": True}}
    if setting == "costs":
        options = {"policy": "auto"}
    with engine(known.target, known.head, **TREES, **options) as llm:
        assert generate(llm, asked, max_tokens=TEXT) == expected
        assert accept_length(llm) > 1.15
        if setting == "costs":
            assert measure(runner(llm), runner(llm)._caps, budget=1.0).levels is Levels.PARALLEL
        if setting == "random shapes":
            with random_shapes(llm) as counts:
                assert generate(llm, asked, max_tokens=TEXT) == expected
            assert len(counts) > 1


@MATRIX
def test_bfloat16(known: Known) -> None:
    """The default, with int8 copies of the drafter's weights: drafts are accepted as well."""
    with engine(known.target, known.head, **TREES, dtype="bfloat16") as llm:
        generate(llm, make_prompts(8), max_tokens=TEXT)
        assert type(runner(llm).drafter.model.model.markov_head.markov_w2.quant_method).__name__ == "Int8Method"
        assert accept_length(llm) > 1.5


@MATRIX
def test_a_drafter_that_knows_the_target_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is accepted, although all nodes of a level have the same row: by their own tokens."""
    target = markov_target(tmp_path / "target", vocab=WIDTH)
    following = read_markov_map(target)
    head = dspark_head(tmp_path / "dspark", target, sorted(set(following.tolist())))
    prompts = [[3, 50 + i, int(following[50 + i])] for i in range(4)]
    with engine(target, head, depth=3, topk=2, nodes=8) as llm:
        answers = generate(llm, prompts, max_tokens=TEXT)
        for prompt, text in zip(prompts, answers, strict=True):
            assert all(token == int(following[before]) for before, token in pairwise([prompt[-1], *text]))
        assert accept_length(llm) > 3.9
        before, drafter = rounds(llm), runner(llm).drafter
        after = drafter.levels.after
        wrong = drafter.levels._replace(after=lambda states, tokens: after(states, tokens.roll(1, 0)))
        monkeypatch.setattr(drafter, "levels", wrong)
        assert generate(llm, prompts, max_tokens=TEXT) == answers
        later = rounds(llm, before)
        assert later.tokens < 1.5 * later.count


@MATRIX
def test_sampled_text_has_the_distribution_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a verifier that accepts every draft is found out."""
    target = bigram_target(tmp_path / "target", vocab=WIDTH)
    head = dspark_head(tmp_path / "dspark", target, spoken(target), wrong=0.5)
    with sampled_as_plain(target, head, monkeypatch):
        pass
