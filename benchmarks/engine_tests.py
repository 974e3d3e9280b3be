"""Tests in the environments of engines, and the tables in documents that say how they ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from eagle_plugin.common.atomic_io import write_output

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1800  # of one group of tests
END = "<!-- end -->"


def run_pytest(environment: str, engine: str, options: Sequence[str]) -> tuple[int | None, str, str]:
    """The exit code, None if it took longer than SECONDS, and both outputs. environment: a folder of the checkout."""
    command = [str(ROOT / environment / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += ["-n", "0"] if engine == "sglang" else []
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace"), f"not done after {SECONDS} s"
    return done.returncode, done.stdout, done.stderr


def replace_table(path: Path, begin: str, table: str) -> None:
    """Put `table` between the line `begin` and the next `END`. ValueError where they are not there."""
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{path} has no place for the table: it needs the lines {begin.strip()} and {END}")
    write_output(path, [f"{before}{begin}\n{table}\n{end}{after}"])
