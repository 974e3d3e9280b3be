"""Memory of a process gets into huge pages, and only where the machine and the user let it."""

from __future__ import annotations

import logging
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_plugin.runtime import huge_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# In a process of its own, as in a server: memory that was used before huge pages are asked for.
PROGRAM = """
import logging, sys, torch
from eagle_plugin.runtime.huge_pages import use_huge_pages
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
values = torch.arange(24 << 20, dtype=torch.int32)
use_huge_pages(logging.getLogger())
assert torch.equal(values, torch.arange(24 << 20, dtype=torch.int32))
middle = values.data_ptr() + (48 << 20)  # the pages before the first whole huge page are a mapping of their own
lines = open("/proc/self/smaps").read().splitlines()
words = [line.split()[0] for line in lines]
ranges = [(i, *(int(x, 16) for x in word.split("-"))) for i, word in enumerate(words) if "-" in word]
at = next(i for i, begin, end in ranges if begin <= middle < end)
print(next(line for line in lines[at:] if line.startswith("AnonHugePages")))
"""


def run(**environment: str) -> str:
    given = os.environ | {"EAGLE_HUGE_PAGES": "1"} | environment  # other tests do without: conftest.py
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=given, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def huge_kilobytes(output: str) -> int:
    return int(re.findall(r"AnonHugePages: +(\d+)", output)[-1])


@pytest.mark.skipif(
    not MODE.exists() or "[never]" in MODE.read_text() or not hasattr(mmap, "MADV_HUGEPAGE"),
    reason="this machine gives huge pages to nobody",
)
def test_used_memory_gets_huge_pages_and_keeps_its_values() -> None:
    output = run()
    assert re.search(r"huge pages hold \d+\.\d\d of \d+\.\d\d GiB", output)
    assert huge_kilobytes(output) >= 64 << 10  # of 96 MiB


@pytest.mark.skipif(
    not MODE.exists() or "[madvise]" not in MODE.read_text(), reason="they come without asking, or never"
)
def test_switched_off_by_the_user() -> None:
    output = run(EAGLE_HUGE_PAGES="0")
    assert huge_kilobytes(output) == 0
    assert "huge pages" not in output


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the system's."""
    monkeypatch.setattr(huge_pages, "SYSTEM", tmp_path)
    monkeypatch.delenv("EAGLE_HUGE_PAGES")
    return tmp_path


def log_of_a_start(caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    caplog.set_level(logging.INFO)
    huge_pages.use_huge_pages(logging.getLogger("eagle_plugin"))
    return caplog.text


@pytest.mark.parametrize(("mode", "available"), [("always", True), ("madvise", True), ("never", False), (None, False)])
def test_who_may_ask(mode: str | None, available: bool, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode is not None:
        modes = (f"[{m}]" if m == mode else m for m in ("always", "madvise", "never"))
        (system / "enabled").write_text(" ".join(modes))
    assert huge_pages.available() is available
    monkeypatch.setenv(huge_pages.SWITCH, "0")
    assert not huge_pages.available()


def test_a_machine_that_gives_none_is_told_how(
    system: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (system / "enabled").write_text("always madvise [never]\n")
    assert f"echo madvise > {system}/enabled" in log_of_a_start(caplog)
    monkeypatch.setenv(huge_pages.SWITCH, "0")
    assert not log_of_a_start(caplog)


def test_a_machine_that_says_less_starts_all_the_same(system: Path, caplog: pytest.LogCaptureFixture) -> None:
    (system / "enabled").write_text("always [madvise] never\n")
    log = log_of_a_start(caplog)
    assert "could not ask for huge pages" in log and "hpage_pmd_size" in log
