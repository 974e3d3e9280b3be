"""The kernel tests once more on a library built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import needs_sanitizers, sanitized_environment

from eagle_plugin.kernels import loader

pytestmark = [needs_sanitizers, pytest.mark.matrix]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that runs on the sanitized library."""
    return sanitized_environment(loader.kernel_library(), tmp_path_factory.mktemp("asan"))


def test_the_kernel_tests_pass(sanitized: dict[str, str]) -> None:
    tests = sorted(str(p) for p in Path(__file__).parent.glob("test_*.py") if "_kernels" in p.name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=sanitized, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_read_past_the_end_is_reported(sanitized: dict[str, str]) -> None:
    """Negative control: the argument checks cannot know that these addresses are wrong, but the sanitizer sees it."""
    code = """
import torch
from eagle_plugin.kernels import kv
cache = torch.zeros(8, 64)
i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
window = torch.tensor([[0, 1, 9]])
kv.compact_kv(torch.tensor([cache.data_ptr()]), torch.tensor([256]), window, i32([0, 2]), i32(2))
"""
    done = subprocess.run([sys.executable, "-c", code], env=sanitized, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "compact_kv" in done.stderr
