"""Runs the tests that need vLLM in the environment that has it: a group of files in each process.

A group is a fork of a process that has imported vLLM (vllm_forks.py); the groups are about equally long, so that
several workers can share them out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm_forks import run_pytest

from eagle_plugin.models.store import get_model

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm/bin/python"
NEWEST = ROOT / ".venv-vllm-next/bin/python"  # the release after it, over its compiled parts
FOLDERS = (ROOT / "tests/engines/vllm", ROOT / "tests/heads")
# Without an engine: vLLM's classes, or its model runner alone.
UNITS = {
    "adapter": (
        "attention", "attention_backend", "batch", "block_support", "cache_groups", "capture", "captured_costs",
        "chain_kernels", "compile_cache", "contract", "contract_runner", "decode_step", "deferred_extend",
        "deferred_states", "doctor", "executor", "fake_cuda", "fake_cuda_captured", "fake_cuda_features", "filters",
        "gpu_contract", "gpu_weights", "head_rules", "left_on_gpus", "lookup_states", "options", "platform_attention",
        "policy_reports", "prompt_attention", "prompts_interpreted", "round_costs", "runner_choice",
        "sampling_contract", "sampling_nodes", "scheduled_shapes", "shapes", "stops", "support", "support_gpu",
        "thinking", "unserved_flags", "v2_contract", "v2_fake_cuda", "worker",
    ),
    "heads": ("vllm_round_trip", "vllm_targets", "wild_heads"),
}  # fmt: skip
ENGINES = {
    "greedy": ("greedy",),
    "P-EAGLE": ("parallel_drafts", "parallel_heads"),
    "block drafters": ("block_drafters", "block_drafter_lists", "markov_drafters", "trained_blocks"),
    "families": ("families", "quantised"),
    "MTP layers": ("mtp",),
    "multimodal": ("mla", "multimodal"),
    "linear layers": ("amx", "data_parallel", "linear_attention"),
    "scheduling": ("greedy_scheduling", "head_exchange", "prefix_drafts", "windows", "lora"),
    "requests": ("by_request", "features", "greedy_requests", "head_rows", "lookup", "metrics", "synthetic"),
    "ranks": ("expert_parallel", "tensor_parallel"),
    "self-test": ("selftest", "v2_requests"),
    "caches": ("float8_engine", "kv_connectors", "v2_targets"),
    "graphs": ("graphs", "gpu_adapters", "host_waits", "launches"),
    "sampling": ("sampling_distribution", "seeds"),
    "parameters": ("grammar", "parameters", "prompt_embeds", "sampling_thinking", "logprobs", "refusals"),
    "real model": ("serving", "gpu_model"),
    "V2 runner": ("v2_runner",),
}
GROUPS = UNITS | ENGINES
FILES = {
    path.stem.removeprefix("test_"): path
    for path in [*FOLDERS[0].glob("test_*.py"), *FOLDERS[1].glob("test_vllm_*.py")]
}
# Of vLLM's own classes some end with a segmentation fault over the older compiled parts: Qwen3's in "heads".
# Experts in MXFP4 ("amx") give an operator one argument more than those parts take.
OF_NEWEST = [name for name in GROUPS if name not in ("heads", "linear layers", "real model")]
SECONDS = 840  # of one process of `make test`; the limit of a test is 900
MATRIX_SECONDS = 1740  # of one of `make test-matrix`


def test_every_file_is_in_a_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(FILES)


def selection(asked: str) -> list[str]:
    """What of a group runs: without the tests of `make test-matrix` where those were not asked for."""
    return ["-m", "not matrix"] if "not matrix" in asked else []


@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")
@pytest.mark.parametrize(
    "group",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in UNITS),
        *(pytest.param(name, marks=pytest.mark.server) for name in ENGINES),
    ],
)
@pytest.mark.timeout(MATRIX_SECONDS + 60)
def test_group(group: str, request: pytest.FixtureRequest) -> None:
    run(PYTHON, group, request)


@pytest.mark.matrix
@pytest.mark.skipif(not NEWEST.exists(), reason="there is no .venv-vllm-next; make it with `make env-vllm-next`")
@pytest.mark.parametrize("group", OF_NEWEST)
def test_group_in_the_newest_release(group: str, request: pytest.FixtureRequest) -> None:
    """What `make test` runs in the release before."""
    run(NEWEST, group, request, quick=True)


def run(python: Path, group: str, request: pytest.FixtureRequest, quick: bool = False) -> None:
    if group == "real model":
        get_model("smollm2-135m-instruct")
    files = [str(FILES[name]) for name in GROUPS[group]]
    chosen = selection("not matrix" if quick else request.config.option.markexpr)
    arguments = ["-q", "-p", "no:cacheprovider", "--durations=10", *files, *chosen]
    code, found = run_pytest(python, arguments, SECONDS if chosen else MATRIX_SECONDS)
    print(found[-6000:])  # with -s or -rP: the slowest tests of the group
    assert code == 0, found[-8000:]
    assert re.search(r"^\d+ passed", found, re.MULTILINE)
    assert all("this CPU has" in line for line in re.findall("^SKIPPED .*", found, re.MULTILINE))
