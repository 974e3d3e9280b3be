"""What P-EAGLE heads draft in vLLM is what the reference drafts: all levels from one forward over masked rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from draft_paths import Path as Nodes
from draft_paths import paths_of
from reference_decoder import draft_tree, served_head
from tiny_checkpoints import read_config
from tiny_models import tiny_llama
from torch import Tensor
from trained_heads import trained_head
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm_engines import chosen_by, engine, generate, runner

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.heads.export import save_head
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime.parallel_levels import HeadLevels, MaskRow
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.round_costs import is_faster_than, measure

LENGTH = 12
SHAPE = Shape(4, 3, 12)
BUDGET = 24  # tokens per step


class Pair(NamedTuple):
    """A target and a head that knows nothing, whose drafts so depend on all that it reads."""

    target: Path
    head: Path
    model: Any  # both in transformers and in our modules
    module: Any

    def wanted(self, text: list[int], shape: Shape) -> set[Nodes]:
        """The nodes of the reference's tree after a text."""
        greedy, key = SamplingParams.greedy(1), torch.zeros(1, dtype=torch.int64)
        with torch.no_grad():
            drafted = draft_tree(self.model, self.module, text, greedy, key, shape)
        return set(paths_of(Drafts(drafted, shape), 0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("tiny")
    target, head = tiny_llama(folder / "target", head_dim=32), folder / "head"
    made = trained_head("peagle", target, layers=2, mask_token_id=2, aux_layers=(1, 4, 6))
    save_head(made, head, target_dir=target, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return Pair(target, head, model, served_head(target, head))


@pytest.fixture(scope="module")
def tiny(pair: Pair) -> Iterator[LLM]:
    """With the flag of vLLM's own drafting."""
    depth, topk, nodes = SHAPE
    speculative = {"method": "eagle3", "model": str(pair.head), "num_speculative_tokens": nodes - 1}
    options: dict[str, Any] = {"speculative_config": speculative | {"parallel_drafting": True}, "max_num_seqs": 2}
    shape = {"depth": depth, "topk": topk, "nodes": nodes}
    with engine(pair.target, pair.head, **shape, **options, max_num_batched_tokens=BUDGET) as llm:
        yield llm


Found = list[tuple[list[int], Shape, set[Nodes]]]


def drafts_of(llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Found:
    """Every tree that an engine drafts for a prompt, one request alone: the text before it, its shape, its nodes."""
    drafter, found = runner(llm).drafter, []
    original = drafter.draft_tree

    def kept(batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        drafts = original(batch, roots, state)
        found.append((int(batch.lengths[0]), int(roots[0]), batch.shape, set(paths_of(drafts, 0))))
        return drafts

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "draft_tree", kept)
        text = prompt + generate(llm, [prompt], max_tokens=LENGTH)[0]
    assert all(text[n] == root for n, root, _, _ in found if n < len(text))  # after parts of the prompt too
    return [(text[: n + 1], shape, nodes) for n, root, shape, nodes in found if n < len(text)]


def differing(pair: Pair, found: Found) -> int:
    """How many trees are not those of the reference."""
    return sum(nodes != pair.wanted(text, shape) for text, shape, nodes in found)


@pytest.mark.parametrize("longest", [5, 3 * BUDGET - 9], ids=["read at once", "read in parts"])
def test_drafts_are_those_of_the_reference(
    longest: int, pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tiny.llm_engine.vllm_config.speculative_config.parallel_drafting
    prompt = [3 + 7 * i % 400 for i in range(longest)]
    found = drafts_of(tiny, prompt, monkeypatch)
    assert len(found) > LENGTH // 2 and {shape for _, shape, _ in found} == {SHAPE}
    assert max(len(path) for _, _, nodes in found for path in nodes) >= 3
    assert differing(pair, found) == 0


def test_drafts_after_plain_rounds_are_those_of_the_reference(
    pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masked rows come after all tokens of the plain rounds, which the head reads before."""

    class Turns(ShapeChooser):
        rounds = 0

        def choose(self, *arguments: Any) -> Shape:
            self.rounds += 1
            return PLAIN if self.rounds % 4 in (1, 2) else self.caps

    prompt = [3 + 5 * i % 400 for i in range(9)]
    with chosen_by(tiny, Turns(SHAPE, None)):
        found = drafts_of(tiny, prompt, monkeypatch)
    assert len(found) >= 4 and differing(pair, found) == 0
    monkeypatch.setattr(runner(tiny).drafter, "read_deferred", lambda *rows: None)
    for layer in runner(tiny).drafter._draft_attn_layer_names:  # the blocks still hold what the last call wrote
        runner(tiny).compilation_config.static_forward_context[layer].kv_cache.zero_()
    with chosen_by(tiny, Turns(SHAPE, None)):
        assert differing(pair, drafts_of(tiny, prompt, monkeypatch)) > 0


@pytest.mark.parametrize("part", ["token", "features"])
def test_another_mask_is_noticed(part: str, pair: Pair, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the levels after the first come from the mask's token and features."""
    drafter = runner(tiny).drafter
    token, hidden = drafter.levels.mask
    other = MaskRow(token + 1, hidden) if part == "token" else MaskRow(token, hidden.roll(1))
    monkeypatch.setattr(drafter, "levels", HeadLevels(other))
    found = drafts_of(tiny, [3, 40, 41, 99], monkeypatch)
    assert differing(pair, found) == len(found) > 0


def test_costs_are_of_one_forward_for_all_levels(tiny: LLM) -> None:
    """Rows of a level are levels: one request has at most those of the caps."""
    served = runner(tiny)
    costs = measure(served, served._caps)
    assert costs.levels is Levels.PARALLEL
    rows = set(costs.level.curve.rows)
    assert {1, SHAPE.steps - 1} <= rows and all(n < SHAPE.steps or n % (SHAPE.steps - 1) == 0 for n in rows)


def test_costs_of_a_busy_machine_are_recognised(tiny: LLM) -> None:
    served = runner(tiny)

    def costs(seconds: float) -> Costs:
        one = Forward(Curve.of([(1, seconds)]))
        return Costs(one, one, one)

    assert is_faster_than(served, served._caps, costs(100.0))
    assert not is_faster_than(served, served._caps, costs(1e-6))


def test_a_head_in_the_form_of_speculators(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives it the name of another class, and the token that of another key."""
    head = tmp_path / "head"
    save_head(pair.module, head, target_dir=pair.target, dtype=torch.float32)
    (head / "eagle_plugin.json").unlink()
    layer = read_config(head)
    proposal = {"proposal_type": "greedy", "speculative_tokens": SHAPE.width - 1}
    (head / "config.json").write_text(
        json.dumps(
            {
                "speculators_model_type": "peagle",
                "speculators_config": {
                    "algorithm": "peagle",
                    "proposal_methods": [proposal],
                    "verifier": {"name_or_path": str(pair.target)},
                },
                "transformer_layer_config": layer | {"mask_token_id": None, "ptd_token_id": None},
                "architectures": ["PEagleDraftModel", "Eagle3"],
                "draft_vocab_size": layer["draft_vocab_size"],
                "mask_token_id": 2,
                "eagle_aux_hidden_state_layer_ids": layer["eagle_aux_hidden_state_layer_ids"],
            }
        )
    )
    with engine(pair.target, head, depth=SHAPE.steps, topk=SHAPE.topk, nodes=SHAPE.width) as llm:
        draft_config = llm.llm_engine.vllm_config.speculative_config.draft_model_config
        assert draft_config.architecture == "PeagleLlamaForCausalLM"
        found = drafts_of(llm, [3, 40, 41, 99], monkeypatch)
    assert len(found) > LENGTH // 2 and differing(pair, found) == 0
