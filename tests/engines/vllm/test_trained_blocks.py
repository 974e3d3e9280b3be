"""Block drafters that are trained here, in vLLM: a small one that has learnt some texts of its target by heart.

Its drafts must then be right nearly always. They are not if the block or the context is computed otherwise in training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference_decoder import plain_greedy
from tiny_models import tiny_llama
from toy_targets import ToyDocument
from trained_heads import rewrite
from transformers import AutoModelForCausalLM
from vllm_engines import engine, generate, rounds

from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.export import save_head
from eagle_plugin.learning.data.store.features import Readout, Taps
from eagle_plugin.learning.train.batches import pack
from eagle_plugin.learning.train.methods import ObjectiveSettings
from eagle_plugin.learning.train.objectives import Objective

BLOCK, PROMPT, ANSWER = 6, 6, 40
UPDATES = 70


class Learnt(NamedTuple):
    target: Path
    documents: list[list[int]]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    target = tiny_llama(tmp_path_factory.mktemp("learnt") / "target", head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = [[3 + 7 * j % 400 + 11 * i for j in range(PROMPT)] for i in range(4)]
    return Learnt(target, [prompt + plain_greedy(model, prompt, ANSWER) for prompt in prompts])


def train(folder: Path, learnt: Learnt, causal: bool) -> Path:
    """A drafter of two layers that knows the texts."""
    head = new_head("dflash", learnt.target, layers=2, mask_token_id=2, block_size=BLOCK, causal=causal, init="random")
    model = AutoModelForCausalLM.from_pretrained(learnt.target, dtype=torch.float32)
    documents = []
    with Taps(model, head.aux_layers) as taps:
        for text in learnt.documents:
            aux, last = taps.run(torch.tensor([text]), [len(text)])
            assert aux is not None
            documents.append(ToyDocument(torch.tensor(text), torch.arange(len(text)) >= PROMPT, aux[0], last[0]))
    batch = pack(documents)
    settings = ObjectiveSettings(steps=BLOCK - 1, top_k=1, keep_rate=1.0, dtype=torch.float32)
    objective = Objective(head, Readout.of(model), settings)
    optimiser = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    for update in range(UPDATES):
        plan = objective.plan(batch, update)
        optimiser.zero_grad()
        objective(batch, plan, plan.totals).loss.backward()
        optimiser.step()
    save_head(head, folder, target_dir=learnt.target, dtype=torch.float32)
    return folder


def served(learnt: Learnt, head: Path, **trees: Any) -> float:
    """Tokens per round of the texts in an engine, which must be those of plain decoding."""
    prompts, answers = ([text[:PROMPT] for text in learnt.documents], [text[PROMPT:] for text in learnt.documents])
    with engine(learnt.target, head, **trees) as llm:
        assert generate(llm, prompts, max_tokens=ANSWER) == answers
        found = rounds(llm)
        return found.tokens / found.count


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["whole", "causal"])
def test_vllm_accepts_what_was_learnt(causal: bool, learnt: Learnt, tmp_path: Path) -> None:
    chain: dict[str, Any] = {"depth": BLOCK - 1, "topk": 1, "nodes": BLOCK}
    head = train(tmp_path / "head", learnt, causal)
    assert served(learnt, head, **chain) > 4.5
    if causal:  # what it lists does not depend on the length of the block: here it has three rows
        assert served(learnt, head, depth=2, topk=1, nodes=3) > 2.7


@pytest.mark.matrix
def test_what_is_read_one_layer_off_is_not_accepted(learnt: Learnt, tmp_path: Path) -> None:
    """target_layer_ids count outputs, and the features of training are inputs of layers."""
    head = train(tmp_path / "head", learnt, False)

    def shifted(config: dict[str, Any]) -> dict[str, Any]:
        options = config["dflash_config"]
        return config | {"dflash_config": options | {"target_layer_ids": [i + 1 for i in options["target_layer_ids"]]}}

    wrong = served(learnt, rewrite(head, tmp_path / "off", shifted), depth=BLOCK - 1, topk=1, nodes=BLOCK)
    assert wrong < 3
