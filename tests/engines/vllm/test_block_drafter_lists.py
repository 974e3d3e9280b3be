"""Block drafters (DFlash) with draft trees in vLLM: what they list is what a computation in plain torch lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dflash_models import tiny_dflash
from dflash_reference import DFlashReference
from family_models import family_target
from tiny_models import tiny_llama
from torch import Tensor
from vllm import LLM
from vllm_block_faults import BLOCK, causal_block, other_mask, shifted_context, shifted_positions, shorter_block
from vllm_engines import (
    chosen_by,
    engine,
    generate,
    runner,
)

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.runtime.parallel_levels import Block, HeadLevels
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm.head_forwards import DraftBatch

SHAPE = Shape(5, 3, 12)
MATRIX = pytest.mark.matrix  # lists and greedy text run always, the functions of captured steps on fake CUDA
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
