"""The patches of upstream/: an engine with one applied, as a folder of links, and the patch's test run with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "upstream"
NAMES = tuple(sorted(file.parent.name for file in FOLDER.glob("*/fix.patch")))
PREFIX = {"vllm": "", "sglang": "python/"}  # of the package in the engine's repository
# How a test fails with the stock engine, where that is not an assertion.
REASONS = {
    "vllm-seed-chunks": "RuntimeError: CPU Generator does not use offset",
}


def engine_of(name: str) -> str:
    return name.partition("-")[0]


def test_of(name: str) -> Path:
    (test,) = (FOLDER / name).glob("test_*.py")
    return test


def changed_files(name: str) -> dict[str, tuple[int, int]]:
    """The files that a patch changes, below site-packages: how many lines it adds to each, and removes."""
    text = (FOLDER / name / "fix.patch").read_text("utf-8")
    parts = re.split(rf"^--- a/{PREFIX[engine_of(name)]}(.+)\n\+\+\+ .+\n", text, flags=re.MULTILINE)[1:]
    counts = ((re.findall(r"^\+", part, re.MULTILINE), re.findall("^-", part, re.MULTILINE)) for part in parts[1::2])
    return {file: (len(added), len(removed)) for file, (added, removed) in zip(parts[::2], counts, strict=True)}


def apply(name: str, packages: Path, into: Path) -> None:
    """Make a folder with the engine of these site-packages and the patch: links, and copies of the changed files.

    Raises ValueError where the patch does not apply.
    """
    for file in changed_files(name):
        source, made = packages, into
        for part in Path(file).parts[:-1]:
            source, made = source / part, made / part
            if made.is_symlink():
                made.unlink()
            made.mkdir(parents=True, exist_ok=True)
            for child in source.iterdir():
                if child.name != "__pycache__" and not (made / child.name).exists():
                    (made / child.name).symlink_to(child)
        (into / file).unlink()
        shutil.copy(packages / file, into / file)
    strip = 1 + PREFIX[engine_of(name)].count("/")
    done = subprocess.run(
        ["git", "apply", f"-p{strip}", str(FOLDER / name / "fix.patch")],
        cwd=into,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(into.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"{name}: the patch does not apply to {packages}: {done.stderr.strip()}")


def run_test(name: str, python: Path, environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the patch's test in a folder of its own."""
    folder.mkdir()
    test = shutil.copy(test_of(name), folder)
    command = [str(python), "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "--rootdir", str(folder), test]
    return subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False)
