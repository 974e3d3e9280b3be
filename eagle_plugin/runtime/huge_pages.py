"""Huge pages for what a server on a CPU reads in every forward: weights, and the caches.

A CPU looks up the address of every page and fetches ahead within one page only, so pages of 4 KiB make it read more
slowly than pages of 2 MiB, above all in a virtual machine (docs/performance.md has figures). Many distributions give
huge pages to who asks for them only (madvise(2), MADV_HUGEPAGE); the engines do not ask.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

SWITCH = "EAGLE_HUGE_PAGES"
SMALLEST = 16 << 20  # bytes of a mapping; stacks of threads, of which little is ever used, have 8 MiB
COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1; an older kernel makes the pages huge little by little
SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def available() -> bool:
    """Whether this process may ask for huge pages: Linux gives them to who asks, and ``EAGLE_HUGE_PAGES`` is not 0."""
    return not _switched_off() and _mode() in ("madvise", "always")


def use_huge_pages(logger: logging.Logger) -> None:
    """Put the large memory of this process into huge pages, and say so; what is allocated later stays as it is.

    Nothing is done where they are not `available`. What cannot have them keeps its pages.
    """
    if not available():
        if not _switched_off() and _mode() == "never":
            logger.info(
                "eagle-plugin: huge pages are switched off on this machine (%s is never): a CPU decodes slower without "
                "them; `echo madvise > %s` as root lets this server have them",
                *[SYSTEM / "enabled"] * 2,
            )
        return
    began = time.perf_counter()
    try:
        _ask()
        huge, resident = _kilobytes("AnonHugePages"), _kilobytes("Rss")
    except (OSError, ValueError, AttributeError) as error:  # the server is slower then, and right
        logger.info(
            "eagle-plugin: this process could not ask for huge pages (%s): it keeps the pages that it has", error
        )
        return
    logger.info(
        "eagle-plugin: huge pages hold %.2f of %.2f GiB of this process (%.1f seconds; EAGLE_HUGE_PAGES=0 leaves it as "
        "it is)",
        huge / 2**20,
        resident / 2**20,
        time.perf_counter() - began,
    )


def _ask() -> None:
    size = int((SYSTEM / "hpage_pmd_size").read_text())
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for begin, end in _mappings():
        begin, end = -(-begin // size) * size, end // size * size
        if begin < end and not madvise(begin, end - begin, mmap.MADV_HUGEPAGE):
            # Pages that are there already; of those that are not, the first touch makes huge ones.
            madvise(begin, end - begin, COLLAPSE)


def _switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def _mode() -> str:
    """Who gets huge pages: always, madvise or never; empty where the system does not say."""
    try:
        found = re.search(r"\[(\w+)\]", (SYSTEM / "enabled").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _mappings() -> Iterator[tuple[int, int]]:
    """First address and end of this process's large anonymous memory, which is its own and can be written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and end - begin >= SMALLEST:
            yield begin, end


def _kilobytes(name: str) -> int:
    """A number of /proc/self/smaps_rollup."""
    found = re.search(rf"^{name}: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
