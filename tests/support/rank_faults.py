"""A plugin for the test server: faults of rank 1 of tensor parallelism.

The faults are words in the file that EAGLE_TEST_FAULT points to, read at every round: "slow" (rank 1 sleeps before each
walk), "skewed" (rank 1 walks with other random numbers), "alone" (no rank listens to rank 0); none of them when the
file says "none". Rounds in which rank 1 walked another path than rank 0 are counted, see `splits`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import broken_verifier
import torch

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
        if "alone" in switch.read_text().split():
            return accepted
        agreed = healthy_agree(self, accepted)
        if _rank() == 1 and not all(torch.equal(*values) for values in zip(accepted, agreed, strict=True)):
            with switch.with_name("splits").open("a") as file:
                file.write(".")
        return agreed

    sampling.verify_tree, RankAgreement.agree = walk, agree


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def install(folder: Path) -> dict[str, str]:
    """Write the entry point into `folder`, with no fault chosen; returns the environment of the server."""
    environment = broken_verifier.install(folder, "rank_faults")
    (folder / "splits").touch()
    return environment


def splits(folder: Path) -> int:
    """Rounds until now in which rank 1 walked another path than rank 0, which it left for that of rank 0."""
    return (folder / "splits").stat().st_size
