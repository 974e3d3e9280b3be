"""Step `equality`: greedy text by draft trees equals plain greedy text, in float32 without an engine.

The head is the target again, with noise: drafts are accepted now and then, so that every place of a tree is reached.
The batch has requests of different lengths. The numbers of one forward differ by rounding from those of another one
with more rows, so two tokens that are nearly equally likely may change places: such a text is reported with the
difference of the two logits, and counts as equal below NEARLY_EQUAL.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks.gpu.decoding import PlainDecoder, TreeDecoder, new_slot_table, plain_text, tree_text
from benchmarks.gpu.heads import EchoHead
from benchmarks.gpu.llama import Llama
from benchmarks.gpu.models import SMALL
from benchmarks.gpu.phases import Round, capturing
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.core.shape import Shape

SHAPES = (Shape(1, 4, 5), Shape(3, 4, 16), Shape(5, 2, 8), Shape(4, 8, 64))
PROMPT_LENGTHS = (3, 1, 70, 29)  # one longer than a chunk of the prefill
NOISE = 1.5  # standard deviation; that of the logits is 3
NEARLY_EQUAL = 1e-3


def run(setting: Setting) -> dict[str, Any]:
    """Compare plain decoding with every shape; StepError when a text differs or no draft was ever accepted."""
    tokens = 40 if setting.tiny else 200
    shapes = SHAPES[:2] if setting.tiny else SHAPES
    torch.manual_seed(0)
    prompts = [torch.randint(0, SMALL.model.vocabulary, (n,)).tolist() for n in PROMPT_LENGTHS]
    # A request may go on by E tokens per round until the slowest one has enough, by one token per round.
    positions = max(PROMPT_LENGTHS) + max(tokens * shape.max_accept_length + shape.reach for shape in shapes)
    slot_table = new_slot_table(len(prompts), positions, setting.device)
    target = SMALL.target(positions, setting.device)
    wanted = plain_text(PlainDecoder(target, slot_table), prompts, tokens)
    found = []
    with capturing(setting) as new_capturer:
        for shape, captured in itertools.product(shapes, (False, True)):
            decoder = TreeDecoder(target, EchoHead(target, slot_table, NOISE), slot_table, shape)
            run_round = Round(decoder, new_capturer()) if captured else decoder.round
            responses, accept_length = tree_text(decoder, run_round, prompts, tokens)
            gaps = [gap_at_difference(target, *row) for row in zip(prompts, responses, wanted, strict=True)]
            check(f"{'captured' if captured else 'eager'} rounds of shape {shape}", shape, gaps, accept_length)
            row = {"shape": str(shape), "captured": captured, "accept_length": round(accept_length, 3)}
            found.append(row | {"nearly_equal": sum(map(bool, gaps))})
    about = {"model": SMALL.name, "dtype": "float32", "requests": len(prompts), "tokens": tokens}
    lengths = ", ".join(f"{row['shape']} {row['accept_length']}" for row in found if row["captured"])
    return about | {"rounds": found, "summary": [f"all text equal; accept lengths: {lengths}"]}


def check(what: str, shape: Shape, gaps: list[float], accept_length: float) -> None:
    """StepError for a text that differs where the logits are far apart, or where equal text proves nothing."""
    if max(gaps) >= NEARLY_EQUAL:
        raise StepError(
            f"text {gaps.index(max(gaps))} by {what} is not plain greedy text, where they part the logits are "
            f"{max(gaps):.3g} apart, wanted less than {NEARLY_EQUAL}: the step `kernels` finds a wrong kernel"
        )
    if not 1.1 < accept_length < shape.max_accept_length - 0.1:
        raise StepError(
            f"the accept length of {what} is {accept_length:.2f}, wanted more than 1.1 and less than "
            f"{shape.max_accept_length - 0.1:.1f}: with all or no drafts accepted, equal text proves nothing"
        )


def gap_at_difference(target: Llama, prompt: list[int], found: list[int], wanted: list[int]) -> float:
    """How far apart the target's logits are of the first tokens that differ between two responses; 0 for equal ones."""
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if x != y:
            slot_table = new_slot_table(1, len(prompt) + i + 1, target.device)
            decoder = PlainDecoder(target, slot_table)
            logits: list[torch.Tensor] = []
            text = torch.tensor(prompt + wanted[:i], device=target.device)
            for first in range(0, len(text), 64):
                part = text[first : first + 64]
                logits.append(target.forward(decoder.chain_rows(0, first, part), decoder.cache)[0][-1])
            return abs(float(logits[-1][x] - logits[-1][y]))
    return 0.0
