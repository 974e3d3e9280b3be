"""Two ranks of vLLM's expert parallelism on a CPU, each with half of the experts of a target: the text of one rank.

vLLM's own experts of a CPU do not know which of them a rank has; here they are told (vllm_cpu_experts.py), with the
plugin and without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from family_models import family_head, family_target
from vllm_cpu_experts import EXTENSION, complete
from vllm_engines import accept_length, engine, generate
from vllm_requests import make_prompts

from eagle_plugin.vllm.parallel_support import experts_know_their_map

CORES = sorted(os.sched_getaffinity(0))
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "worker_extension_cls": EXTENSION}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[-1]}")
    assert not experts_know_their_map(), "vLLM tells its experts by itself: this needs no help"
    complete(monkeypatch)
    assert experts_know_their_map()


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_text_is_that_of_one_rank(family: str, tmp_path: Path, told: None) -> None:
    target, prompts = family_target(tmp_path / "target", family), make_prompts(24)
    head = family_head(tmp_path / "head", target)
    with engine(target) as plain:
        expected = generate(plain, prompts)
    assert len({tuple(text) for text in expected}) > 20
    with engine(target, **EXPERTS) as plain:
        assert generate(plain, prompts) == expected
    with engine(target, head, depth=3, topk=8, nodes=32, **EXPERTS) as served:
        assert generate(served, prompts) == expected
        assert accept_length(served) > 1.03
