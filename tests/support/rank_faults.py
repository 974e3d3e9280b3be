"""A plugin for the test server: faults of rank 1 of tensor parallelism.

The faults are words in the file that EAGLE_TEST_FAULT points to, read at every round: "slow" (rank 1 sleeps in each
round), "skewed" (rank 1 walks with other noise from the next round on), "alone" (no rank listens to rank 0);
none of them when the file says "none". Rounds in which rank 1 walked another path than rank 0 are counted, see
`splits`.
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
    from eagle_plugin.kernels import sampling
    from eagle_plugin.runtime.ranks import RankAgreement

    switch = Path(os.environ["EAGLE_TEST_FAULT"])
    healthy_walk, healthy_agree = sampling.verify_tree, RankAgreement.agree
    # A tensor, because Python does not run again in a walk that was captured.
    skew = torch.zeros((), dtype=torch.int64)

    def walk(tree, logits, params, rng_keys, *others, **options):
        # A tree of the root alone may be a prefill's: its token is not agreed upon.
        skewed = rng_keys + skew if tree.tokens.shape[1] > 1 else rng_keys
        return healthy_walk(tree, logits, params, skewed, *others, **options)

    def agree(self, accepted):
        faults = switch.read_text().split()
        skew.fill_(37 if "skewed" in faults and _rank() == 1 else 0)
        if "slow" in faults and _rank() == 1:
            time.sleep(SLOW_S)
        if "alone" in faults:
            return accepted
        walked = [values.clone() for values in accepted]
        agreed = healthy_agree(self, accepted)
        if _rank() == 1 and not all(torch.equal(*values) for values in zip(walked, agreed, strict=True)):
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
