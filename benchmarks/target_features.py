"""Checkpoints and flags beyond the families of `benchmarks/targets.py`, each shown by tests that compare whole texts.

A feature is served where its tests pass: they run the engine with the plugin and without it over a tiny target, compare
greedy float32 text, and fail under a planted fault. What no CPU here runs is shown on fake CUDA tensors and in Triton's
interpreter, and compares no text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.engine_tests import run_pytest
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.spec import EngineName

BEGIN = "<!-- benchmarks/targets.py --features --document -->\n"
# What an engine's release lacks on a CPU (a product, an exchange between ranks) is computed in torch in some tests.
Device = Literal["CPU", "CPU, parts in torch", "fake CUDA", "Triton's interpreter"]
PARTS: Device = "CPU, parts in torch"
ENVIRONMENTS = {"sglang": ".venv-sglang", "vllm": ".venv-vllm"}


class Feature(NamedTuple):
    """What users have, and the tests that show it, as pytest names them below tests/."""

    name: str
    engine: EngineName
    tests: tuple[str, ...]
    device: Device = "CPU"


class FeatureRow(Strict):
    """One feature in one engine."""

    feature: str
    engine: str
    device: str
    served_by: str  # "plugin", or "unknown" where a test failed
    greedy_equal: bool | None  # None: these tests compare no text of a plain engine
    passed: int
    seconds: float
    tests: list[str]


VLLM, SGLANG = "engines/vllm/test_", "engines/sglang/test_"
FEATURES = (
    Feature("images in the prompt", "sglang", (f"{SGLANG}multimodal.py::test_pictures_in_prompts",)),
    Feature("images in the prompt", "vllm", (f"{VLLM}multimodal.py::test_pictures_in_prompts",)),
    Feature("quantised: AWQ", "sglang", (f"{SGLANG}quantised.py",), PARTS),
    Feature(
        "quantised: w4a16, GPTQ, AWQ, FP8 blocks",
        "vllm",
        (f"{VLLM}quantised.py::test_text_equals_plain_decoding",),
        PARTS,
    ),
    Feature(
        "quantised lm_head", "vllm", (f"{VLLM}quantised.py::test_a_quantised_output_layer_is_the_heads_too",), PARTS
    ),
    Feature("8-bit KV cache", "vllm", (f"{VLLM}float8_engine.py",)),
    Feature("8-bit KV cache", "sglang", (f"{SGLANG}float8_caches.py",), "fake CUDA"),
    Feature("8-bit KV cache, kernels", "sglang", ("kernels/test_triton_interpreter.py",), "Triton's interpreter"),
    Feature("gated delta nets", "vllm", (f"{VLLM}linear_attention.py::test_text_and_distribution",)),
    Feature("gated delta nets on GPUs", "vllm", (f"{VLLM}linear_attention.py::test_text_by_replays",), "fake CUDA"),
    Feature("LoRA", "sglang", (f"{SGLANG}lora.py",)),
    Feature("LoRA on GPUs", "sglang", (f"{SGLANG}gpu_adapters.py",), PARTS),
    Feature("LoRA", "vllm", (f"{VLLM}lora.py",)),
    Feature("LoRA on GPUs", "vllm", (f"{VLLM}gpu_adapters.py",), PARTS),
    Feature("tensor parallelism", "sglang", (f"{SGLANG}tensor_parallel.py",)),
    Feature("tensor parallelism", "vllm", (f"{VLLM}tensor_parallel.py",)),
    Feature("prefill and decode on two servers", "vllm", (f"{VLLM}kv_connectors.py",)),
    Feature("latent attention (MLA)", "vllm", (f"{VLLM}mla.py",)),
    Feature("expert parallelism", "sglang", (f"{SGLANG}parallel_experts.py",)),
    Feature("expert parallelism", "vllm", (f"{VLLM}expert_parallel.py",), PARTS),
    Feature("several replicas", "sglang", (f"{SGLANG}replicas.py",)),
    Feature(
        "data-parallel attention",
        "sglang",
        (f"{SGLANG}data_parallel_attention.py::test_greedy_text_equals_plain_decoding",),
    ),
    Feature("several replicas", "vllm", (f"{VLLM}data_parallel.py",), PARTS),
    Feature("heads of other layouts", "sglang", (f"{SGLANG}head_rows.py",)),
    Feature("heads of other layouts", "vllm", (f"{VLLM}head_rows.py",)),
)


def try_feature(feature: Feature, log: Path) -> FeatureRow:
    """Run the tests of a feature in its engine's environment; their output is in `log`."""
    began = time.monotonic()
    tests = [f"tests/{test}" for test in feature.tests]
    code, output, errors = run_pytest(ENVIRONMENTS[feature.engine], feature.engine, tests)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(output + errors, encoding="utf-8")
    found = re.search(r"^(?:\d+ \w+, )?(\d+) passed", output, re.MULTILINE)
    passed = int(found[1]) if found else 0
    served = code == 0 and passed > 0
    return FeatureRow(
        feature=feature.name,
        engine=feature.engine,
        device=feature.device,
        served_by="plugin" if served else "unknown",
        greedy_equal=served if feature.device.startswith("CPU") else None,
        passed=passed,
        seconds=time.monotonic() - began,
        tests=list(feature.tests),
    )


def features_table(rows: Sequence[FeatureRow]) -> str:
    """Features by engines, in Markdown."""
    lines = ["| checkpoint or flag | engine | shown on | text equal | tests |", "|---|---|---|---|---|"]
    for row in rows:
        equal = {True: "yes", False: "**no**", None: "not compared"}[row.greedy_equal]
        equal = equal if row.served_by == "plugin" else "**a test failed**"
        tests = ", ".join(f"`{test}`" for test in row.tests)
        lines.append(f"| {row.feature} | {row.engine} | {row.device} | {equal} | {tests} |")
    return "\n".join(lines) + "\n"
