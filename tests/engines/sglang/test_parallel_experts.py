"""Two ranks of SGLang's expert parallelism on a CPU, each with half of the experts: text and distribution of one."""

from __future__ import annotations

from pathlib import Path

import broken_verifier
import pytest
from family_draws import check_distribution
from family_models import family_head, sampling_settings, sglang_target
from serving import OVERLAP, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

pytest.importorskip("sglang")
pytestmark = [pytest.mark.server, pytest.mark.matrix]

TOKENS = 64
EXPERTS = ("--skip-server-warmup", *("--tp-size", "2"), *("--ep-size", "2"))
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # they share the cores; SGLang wants to be told


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_text_and_distribution_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    target, prompts = sglang_target(tmp_path / "target", family), make_prompts(24)
    head = family_head(tmp_path / "head", target)
    faults = tmp_path / "plugins"  # the control of the distribution
    environment = OVERLAP | TWO_RANKS | broken_verifier.install(faults)
    parallel = {"extra_flags": EXPERTS, "environment": environment}
    specs = [tiny_spec(target), tiny_spec(target, head, (3, 8, 32), **parallel)]
    with serving(specs, tmp_path / "logs") as (plain, plugin):
        expected = responses(generate_all(plain, prompts, TOKENS, at_once=4))
        assert len(set(expected)) > len(prompts) * 0.8
        answers = generate_all(plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.1
        check_distribution(plain, plugin, faults, sampling_settings(family))
