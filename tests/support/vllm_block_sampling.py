"""Sampled text of vLLM with a block drafter against plain decoding, with a broken verifier that must be found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import broken_verifier
import pytest
from gtest import p_values
from vllm import LLM
from vllm_bigram import OPTIONS, Acceptance, draw
from vllm_engines import engine

from eagle_plugin.runtime import accept

REQUESTS = 800
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {87: 0.8}},
]
LEAST_P = 1e-4 / (6 * 2)  # six views of two settings: a right verifier fails one of these tests once in 10,000 runs


@contextmanager
def sampled_as_plain(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine with the drafter, whose sampled text has the distribution of plain decoding.

    And after the block, a verifier that accepts every draft is found out.
    """
    with engine(target, **OPTIONS) as plain:
        theirs = draw(plain, SETTINGS, 2 * REQUESTS)
    with engine(target, head, depth=4, topk=2, nodes=10, policy="random", **OPTIONS) as llm:
        acceptance = Acceptance(llm)
        for setting, ours, wanted in zip(SETTINGS, draw(llm, SETTINGS, REQUESTS), theirs, strict=True):
            found = p_values(ours, wanted)
            assert min(found.values()) > LEAST_P, (setting, found)
        assert acceptance.length > 1.2
        yield llm
        monkeypatch.setattr(accept, "verify_tree", broken_verifier.FAULTS["every draft accepted"])
        found = p_values(draw(llm, SETTINGS[:1], REQUESTS)[0], theirs[0])
        assert min(found.values()) < LEAST_P**2, found
