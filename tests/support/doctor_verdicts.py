"""Verdicts of `eagle-plugin doctor` on many start commands of SGLang from one process, which imports it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle_plugin.runtime.verdict import Verdict

_SCRIPT = """
import io, json, sys
commands = json.load(sys.stdin)
from eagle_plugin.runtime.verdict import answer
from eagle_plugin.sglang import doctor, version
for command in commands:
    sys.stdin = io.StringIO(json.dumps(command))
    answer("sglang", version.installed(), "eagle_plugin", doctor.judge)
"""


def sglang_flags(target: Path, head: Path | None, algorithm: str | None = "EAGLE3", *more: str) -> list[str]:
    """Flags of a server on a CPU."""
    flags = ["--model-path", str(target), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096"]
    flags += ["--speculative-algorithm", algorithm] if algorithm else []
    return [*flags, *(["--speculative-draft-model-path", str(head)] if head else []), *more]


def sglang_verdicts(commands: Sequence[Sequence[str]], **environment: str) -> list[Verdict]:
    """One verdict for each list of flags, with these variables set."""
    child: Mapping[str, str] = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(list(map(list, commands))), env=child, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    assert len(lines) == len(commands), done.stderr[-3000:]
    return [Verdict.read(line) for line in lines]
