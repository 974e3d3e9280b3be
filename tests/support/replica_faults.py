"""A plugin for a test server with data-parallel attention: faults of its rounds, and copies that can be captured.

The faults are words in the file that EAGLE_TEST_FAULT points to, read at every round: "no idle rounds" (a rank without
requests runs no round beside those of the others), "own shape" (every rank takes the shape that it wants itself),
"temperature one" as of broken_verifier.py; none of them when the file says "none".
"""

from __future__ import annotations

import os
from pathlib import Path

import broken_verifier
import torch
from torch import Tensor

choose = broken_verifier.choose


def register() -> None:
    """Entry point ``sglang.srt.plugins``: to be called before the worker's modules are imported."""
    broken_verifier.register()
    from sglang.srt.layers import dp_attention

    from eagle_plugin.runtime.capturing import emulated
    from eagle_plugin.sglang.data_parallel import SharedRounds
    from eagle_plugin.sglang.decode_round import DecodeRound

    switch = Path(os.environ["EAGLE_TEST_FAULT"])
    agree, verify = SharedRounds.agree, DecodeRound.verify

    def agree_or_not(self, shape, b, must_be_shape=False):
        agreed, most = agree(self, shape, b, must_be_shape)
        return (shape if switch.read_text() == "own shape" else agreed), most

    def verify_or_not(self, batch, drafts):
        return None if switch.read_text() == "no idle rounds" and batch.b == 0 else verify(self, batch, drafts)

    SharedRounds.agree, DecodeRound.verify = agree_or_not, verify_or_not
    if emulated():
        dp_attention.memcpy_func = copy_rows


def copy_rows(dst: Tensor, src: Tensor, dim: int, offset: Tensor, count: Tensor, offset_src: bool) -> None:
    """SGLang's ``memcpy_triton``: what it has for CPUs reads numbers on the host, which no capture allows.

    Copies `count` rows from src[offset:] to dst if offset_src, else from src to dst[offset:].
    """
    assert dim == 0
    rows = torch.arange(len(dst))
    places = rows + offset if offset_src else rows - offset
    copied = rows < count if offset_src else (places >= 0) & (places < count)
    taken = src[places.clamp(0, len(src) - 1)]
    dst.copy_(torch.where(copied.view(-1, *[1] * (dst.dim() - 1)), taken, dst))


def install(folder: Path) -> dict[str, str]:
    """Write the entry point into `folder`, with no fault chosen; returns the environment of the server."""
    return broken_verifier.install(folder, "replica_faults")
