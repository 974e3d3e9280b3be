"""Prompts of a few words, for targets that understand none of them."""

from __future__ import annotations

import random

WORDS = "tree root leaf branch draft target token verify accept path node depth width cache page slot"


def make_prompts(count: int, longest: int = 24) -> list[str]:
    """Prompts of different lengths, some sharing a beginning."""
    dice = random.Random(7)
    shared = " ".join(dice.choices(WORDS.split(), k=12))
    prompts = [" ".join(dice.choices(WORDS.split(), k=dice.randint(1, longest))) for _ in range(count)]
    return [f"{shared} {prompt}" if i % 5 == 0 else prompt for i, prompt in enumerate(prompts)]
