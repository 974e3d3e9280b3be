"""Texts of a seed are counted as the same only where all of their characters are."""

from __future__ import annotations

import pytest

from benchmarks import seeds
from eagle_plugin.bench.load import Completion
from eagle_plugin.bench.stream_fields import Output


def answers(*spoken: str) -> dict[int, Completion]:
    """One per seed 0, 1, ..; each took two rounds."""
    return {
        seed: Completion(str(seed), Output(text=text), "length", 3, 7, 0.1, 0.2, (), verify_rounds=2)
        for seed, text in enumerate(spoken)
    }


def test_responses_are_compared_by_seed() -> None:
    options = seeds.parse(["--engine", "vllm", "--requests", "3", "--tokens", "7"])
    found = seeds.compare(options, [answers("a tree", "a root", "a leaf"), answers("a tree", "a rose", "")])
    assert (found.same, found.requests, found.equal_characters) == (1, 3, [0, 4])
    assert found.accept_length == 3.0
    again = seeds.compare(options, [answers("a tree", "a root"), dict(reversed(answers("a tree", "a root").items()))])
    assert again.same == again.requests == 2 and again.equal_characters == []


def test_bad_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        seeds.parse(["--clients", "1"])
    assert "wanted a number of at least 2" in capsys.readouterr().err
