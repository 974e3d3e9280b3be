"""Step `kernels`: the property tests of tests/kernels with their tensors on the device.

They compare with the oracles of eagle_plugin/core on the CPU. Left out are the tests of what only the CPU kernels do:
checks of values, and results that do not depend on threads or batch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.groups import run_shown
from benchmarks.gpu.steps import Setting, StepError, StepSkipped

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pytest", "pytest_timeout", "hypothesis", "scipy")
TESTS = {
    "tree": (
        "test_topk_log_softmax",
        "test_topk_where_one_stretch_has_all_the_best",
        "test_topk_of_a_broken_head",
        "test_levels_and_selection",
        "test_a_table_of_thousands",
    ),
    "sampling": (
        "test_draws_are_the_oracles",
        "test_draws_of_a_large_vocabulary_have_its_distribution",
        "test_the_kept_tokens_are_the_oracles",
        "test_infinite_and_missing_logits",
        "test_walks_are_the_oracles",
        "test_greedy_walks_are_the_greedy_oracles",
        "test_children_are_the_oracles",
        "test_uniforms_are_philox",
        "test_rows_may_have_gaps",
        "test_a_corrupt_walk_is_caught",
    ),
    "kv": ("test_compact_kv", "test_store_kv"),
    "penalties": ("test_penalize_nodes", "test_count_tokens"),
    "accepted_path": ("test_read_path",),
    "lookup": ("test_rounds_are_the_oracles",),
    "round_start": ("test_start_round", "test_the_comparison_sees_one_slot"),
    "gated_delta_trees": (
        "test_attend_trees",
        "test_commit_trees",
        "test_large_heads",
        "test_equal_keys_down_a_long_path",
    ),
    "attention": ("test_tree_attention", "test_one_wrong_ancestor_bit_changes_that_row_alone"),
    "float8": ("test_every_number_is_read_exactly", "test_store_kv"),
}
WORKERS = 8  # processes for the tests, where pytest-xdist is installed: Triton compiles for most of the time
SHORT = {"attention": TESTS["attention"]}  # the kernel in Triton: the others are CUDA C++, compiled once
TINY = {"tree": ("test_levels_and_selection",), "kv": TESTS["kv"], "attention": ("test_tree_attention",)}


def run(setting: Setting) -> dict[str, Any]:
    """Run them; StepError with the first test that fails."""
    if setting.short:
        return run_pytest(setting, SHORT, examples=30)
    return run_pytest(setting, TINY if setting.tiny else TESTS, examples=3 if setting.tiny else 60)


def run_pytest(
    setting: Setting, tests: Mapping[str, Sequence[str]], examples: int, before: Sequence[str] = ()
) -> dict[str, Any]:
    """Run tests of tests/kernels by file, so many examples of each property; `before` is put before the command.

    Raises:
        StepError: a test fails; its name and the last line of its report.
        StepSkipped: this environment cannot run them.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise StepSkipped(f"{', '.join(missing)} not installed: pip install pytest pytest-timeout hypothesis scipy")
    names = [f"tests/kernels/test_{file}_kernels.py::{name}" for file, tests_ in tests.items() for name in tests_]
    more = {"EAGLE_TEST_DEVICE": setting.device, "EAGLE_TEST_EXAMPLES": str(examples)}
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if setting.on_gpu and not before and importlib.util.find_spec("xdist") is not None:
            options += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
        command = [*before, sys.executable, "-m", "pytest", *options, *names]
        done = run_shown(command, more)
        if not report.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise StepError(f"pytest ended with {done.returncode} and no report: {last}")
        cases = list(xml.etree.ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if failed:
        fault = next(x for kind in ("failure", "error") if (x := failed[0].find(kind)) is not None)
        reason = (fault.get("message") or "?").splitlines()[0]
        raise StepError(
            f"{len(failed)} of {len(cases)} tests fail on {setting.device}, first {failed[0].get('name')}: {reason}"
        )
    if done.returncode or len(cases) < len(names):
        raise StepError(f"pytest ended with {done.returncode} after {len(cases)} tests, wanted {len(names)} or more")
    return {"tests": len(cases), "examples": examples}
