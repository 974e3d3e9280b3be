"""benchmarks/host_policies.py: what is compared, and that the made-up rounds lead the policy where a GPU would."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import host_engines
from benchmarks.host_engines import documents_of_both
from benchmarks.host_policies import BLOCK, Choosers, block_means, host_of
from benchmarks.host_rounds import Round, Run, Scenario
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime.round import Drafts

CAPS = Shape(3, 4, 16)


def test_a_block_has_the_work_of_a_review() -> None:
    """The median over rounds would leave out what the policy does in one of eight."""
    rounds = [Round({"worker": 80.0 if i % BLOCK == 3 else 0.0, "scheduler": 1.0}, {}, CAPS) for i in range(4 * BLOCK)]
    assert host_of(rounds[0]) == 1 and block_means(rounds) == [11.0] * 4
    assert block_means(rounds[:2]) == [1.0]


def test_the_made_up_rounds_lead_to_the_caps() -> None:
    """Nearly all rounds have the caps, and some are compared, as on a GPU where trees of the caps are best."""
    choosers, run = Choosers(), Run(Scenario("greedy 8", 8), True, 1, False, "auto")
    chooser = choosers(run, CAPS, captured_shapes(CAPS))
    assert choosers(run, CAPS, ()) is chooser
    generator, chosen = torch.Generator().manual_seed(1), Counter[Shape]()
    for _ in range(600):
        shape = chooser.choose(8, 800)
        chooser.begin(shape, 8, 800)
        scores = -torch.rand(8, (1 + shape.draft_slots) * shape.topk, generator=generator) - 0.5
        drafts = Drafts.plain(torch.zeros(8))._replace(scores=None if shape == PLAIN else scores)
        chooser.observe(chooser.launched(shape, 8, 800, drafts), [0] * 8)
        chosen[shape] += 1
    assert chosen[CAPS] > 0.9 * chosen.total() and chosen[PLAIN]


def test_fixed_and_random() -> None:
    choosers, scenario = Choosers(), Scenario("greedy 1", 1)
    fixed, mixed = (
        choosers(Run(scenario, True, 1, False, policy), CAPS, captured_shapes(CAPS)) for policy in ("fixed", "random")
    )
    assert {fixed.choose(1, 10) for _ in range(50)} == {CAPS}
    assert {mixed.choose(1, 10) for _ in range(500)} == set(captured_shapes(CAPS))


def script(folder: Path, code: str) -> str:
    path = folder / "script.py"
    path.write_text(f"import sys, pathlib\n{code}\n")
    return str(path)


def test_both_engines_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engines.importlib.util, "find_spec", lambda name: name)
    echo = script(tmp_path, "pathlib.Path(sys.argv[-1]).write_text(' '.join(sys.argv[1:-1]))")
    assert list(documents_of_both(echo, ["--rounds", "3"])) == [
        f"--rounds 3 --engine {engine} --json" for engine in ("sglang", "vllm")
    ]
    with pytest.raises(UserError, match="with SGLang ended with exit code 3"):
        next(documents_of_both(script(tmp_path, "sys.exit(3)"), []))


def test_an_environment_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engines.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(host_engines, "ROOT", tmp_path)
    with pytest.raises(UserError, match="for SGLang: run make env, or ask for one engine with --engine"):
        next(documents_of_both(sys.argv[0], []))
