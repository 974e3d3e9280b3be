"""A setting of the C memory allocator for processes that allocate the same large tensors again and again."""

from __future__ import annotations

import ctypes


def reuse_memory() -> None:
    """Keep freed memory in the process.

    Without this, glibc returns each large tensor to the kernel when it is freed, and the kernel fills the memory of the
    next one with zeros.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)
