"""A plugin for the test server: faults of rank 1 of tensor parallelism.

The faults are words in the file that EAGLE_TEST_FAULT points to, read at every round: "slow" (rank 1 sleeps before each
walk), "skewed" (rank 1 walks with other random numbers), "alone" (no rank listens to rank 0); none of them when the
file says "none".
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import broken_verifier

SLOW_S = 0.05
choose = broken_verifier.choose


def register() -> None:
    """Entry point ``sglang.srt.plugins``: to be called before the worker's modules are imported."""
    from eagle_plugin.engines.sglang.ranks import RankAgreement
    from eagle_plugin.kernels import sampling

    switch = Path(os.environ["EAGLE_TEST_FAULT"])
    healthy_walk, healthy_agree = sampling.verify_tree, RankAgreement.agree

    def walk(tree, logits, params, proposals, uniforms, max_accept_length, **options):
        faults = switch.read_text().split()
        # A tree of the root alone is a prefill's: its token is not agreed upon.
        if tree.tokens.shape[1] > 1 and _rank() == 1:
            if "slow" in faults:
                time.sleep(SLOW_S)
            if "skewed" in faults:
                uniforms = (uniforms + 0.37) % 1
        return healthy_walk(tree, logits, params, proposals, uniforms, max_accept_length, **options)

    def agree(self, accepted):
        return accepted if "alone" in switch.read_text().split() else healthy_agree(self, accepted)

    sampling.verify_tree, RankAgreement.agree = walk, agree


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def install(folder: Path) -> dict[str, str]:
    """Write the entry point into `folder`, with no fault chosen; returns the environment of the server."""
    return broken_verifier.install(folder, "rank_faults")
