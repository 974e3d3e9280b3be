"""What tests of greedy text in vLLM share: a target whose text depends on all of it, heads, prompts, a reference."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bigram_models
import peagle_models
import torch
from reference_decoder import served_head
from tiny_checkpoints import Random, read_config
from tiny_models import markov_eagle2_head
from torch import Tensor
from trained_heads import Weights, rewrite
from transformers import AutoModelForCausalLM
from vllm_engines import Rounds, engine, generate

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.kinds import HEADS
from eagle_plugin.learning.data.rows import TokenRow
from eagle_plugin.learning.evaluate.measure import Responses, greedy_accepted, walk_rounds
from eagle_plugin.learning.reference.draft import prefill_head

VOCAB = bigram_models.VOCAB
ENDING = 7  # which of the spoken tokens ends an answer


def write_target(folder: Path) -> Path:
    """A bigram target whose layers count enough to change greedy choices; a token that it says is its end of text."""
    target = bigram_models.bigram_target(folder / "target", noise=0.02)
    pieces = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]
    ending = bigram_models.spoken(target)[ENDING]
    path = target / "tokenizer_config.json"
    settings = {"eos_token": next(piece for piece, i in pieces.items() if i == ending)}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    path = target / "config.json"
    path.write_text(json.dumps(read_config(target) | {"eos_token_id": ending}))
    return target


def write_heads(folder: Path, target: Path) -> dict[str, Path]:
    """EAGLE-2 and EAGLE-3 heads that are right about every other time, and whose drafts depend on what they attend to.

    "reduced" has a draft vocabulary, "full" and "eagle2" have the target's; "peagle" drafts four levels in one forward.
    """
    sharp = bigram_models.bigram_eagle3_head(folder / "sharp", target, wrong=0.2)
    kept = bigram_models.spoken(target)[: read_config(sharp)["draft_vocab_size"]]
    calm = markov_eagle2_head(folder / "calm", target, wrong=0.1)

    def blur(weights: Weights) -> Weights:
        """Let the newest token attend to others too."""
        return {
            name: w * 0.55 if name.endswith(("q_proj.weight", "k_proj.weight")) else w for name, w in weights.items()
        }

    def widen(weights: Weights) -> Weights:
        logits = torch.full((VOCAB, VOCAB), -8 / math.sqrt(VOCAB))
        logits[kept] = weights["lm_head.weight"]
        return {n: w for n, w in weights.items() if n not in ("d2t", "t2d")} | {"lm_head.weight": logits}

    def disturb(weights: Weights) -> Weights:
        """Let attention add to the state."""
        name = "layers.0.self_attn.o_proj.weight"
        return weights | {name: Random(4).normal(*weights[name].shape, std=0.02)}

    eagle2 = list(HEADS["eagle2"].architectures)
    reduced = rewrite(sharp, folder / "reduced", weights=blur)
    return {
        "reduced": reduced,
        "full": rewrite(reduced, folder / "full", lambda c: c | {"draft_vocab_size": VOCAB}, widen),
        "peagle": peagle_models.peagle_head(folder / "peagle", target, bigram_models.spoken(target), wrong=0.2),
        "eagle2": rewrite(calm, folder / "eagle2", lambda c: c | {"architectures": eagle2}, disturb),
    }


class GreedyModels(NamedTuple):
    """A target, its heads (`write_heads`), and what it says without drafts."""

    target: Path
    heads: dict[str, Path]
    expected: list[list[int]]


def write_models(folder: Path, prompts: list[list[int]]) -> GreedyModels:
    """Write a target and heads, and let vLLM alone answer these prompts."""
    target = write_target(folder)
    with engine(target) as llm:
        expected = generate(llm, prompts)
    return GreedyModels(target, write_heads(folder, target), expected)


def write_blurred_head(folder: Path, target: Path) -> Path:
    """The head "reduced", but it attends to all tokens alike; the others attend to the newest ones."""

    def blur(weights: Weights) -> Weights:
        return {n: 0.05 * w if n.endswith(("q_proj.weight", "k_proj.weight")) else w for n, w in weights.items()}

    return rewrite(write_heads(folder, target)["reduced"], folder / "blurred", weights=blur)


def make_prompts(count: int, longest: int = 90, seed: int = 7) -> list[list[int]]:
    """Prompts of different lengths as token ids, every fifth with the same beginning."""
    dice = random.Random(seed)
    shared = dice.choices(range(3, VOCAB), k=40)
    prompts = [dice.choices(range(3, VOCAB), k=dice.randint(1, longest)) for _ in range(count)]
    return [[*shared, *prompt] if i % 5 == 0 else prompt for i, prompt in enumerate(prompts)]


class Reference:
    """The rounds that our reference decoder needs for responses of a target."""

    def __init__(self, target: Path, heads: Sequence[Path]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._heads = {
            path: served_head(target, path, "EAGLE3" if "Eagle3" in str(read_config(path)) else "EAGLE")
            for path in heads
        }

    @torch.no_grad()
    def rounds(self, head: Path, prompts: list[list[int]], answers: list[list[int]], n: int, *shape: int) -> Rounds:
        """Those for the first n tokens of each answer, which must hold as many more as a round can yield.

        shape: levels, children of a node, nodes with the root.
        """
        loaded, caps = self._heads[head], Shape(*shape)
        rows = [TokenRow("", "", p, a, "length") for p, a in zip(prompts, answers, strict=True)]
        responses = Responses(self._model, rows, loaded.aux_layers, 0.0)
        count = tokens = 0
        for text in responses.items:
            first = len(text.row.prompt_ids)  # a prefill yields the first token; the last needs no round after it
            roots: Tensor = torch.arange(first, first + n - 1)
            prefill = prefill_head(loaded, text.tokens, responses.features(text, loaded))
            accepted = walk_rounds(greedy_accepted(loaded, text.tokens, prefill, roots, caps).tolist())
            count += len(accepted)
            tokens += len(accepted) + sum(accepted)
        return Rounds(count, tokens)
