"""A plugin for the test server: puts a verifier with a fault in the place of `kernels.sampling.verify_tree`.

The fault is named by the file that EAGLE_TEST_FAULT points to, read at every round, so that one server shows them all.
The tests of the sampled distribution must find every one of them; "none" is the healthy verifier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted, verify_greedy
from eagle_plugin.kernels import sampling

Verify = Callable[..., Accepted]  # as `kernels.sampling.verify_tree`
healthy: Verify = sampling.verify_tree


def temperature_one(tree, logits, params, *others, **options):
    broken = params._replace(temperatures=torch.ones_like(params.temperatures))
    return healthy(tree, logits, broken, *others, **options)


def no_filters(tree, logits, params, *others, **options):
    off = SamplingParams.of(len(params.top_ks))
    broken = off._replace(temperatures=params.temperatures, top_ks=off.top_ks.where(params.top_ks > 1, 1))
    return healthy(tree, logits, broken, *others, **options)


def every_draft_accepted(tree, logits, params, rng_keys, lengths, max_accept_length, **options):
    """A walk goes to the best child of each node, whatever the target draws there."""
    drawn = _drawn(tree, logits, params, rng_keys, lengths[:, None] + tree.depths, options)
    for node in reversed(range(1, tree.tokens.shape[1])):  # the first child has the highest score
        of = (tree.parents[:, node] >= 0).nonzero()[:, 0]
        drawn[of, tree.parents[of, node].long()] = tree.tokens[of, node]
    return verify_greedy(tree.tokens, tree.parents, drawn, max_accept_length)


def one_noise_for_a_round(tree, logits, params, rng_keys, lengths, max_accept_length, **options):
    """Every node of a tree draws with the noise of the root."""
    drawn = _drawn(tree, logits, params, rng_keys, lengths[:, None].expand_as(tree.depths), options)
    return verify_greedy(tree.tokens, tree.parents, drawn, max_accept_length)


def one_key_for_all(tree, logits, params, rng_keys, *others, **options):
    return healthy(tree, logits, params, torch.full_like(rng_keys, 5), *others, **options)


def _drawn(tree: DraftTree, logits: Tensor, params: SamplingParams, rng_keys: Tensor, positions: Tensor, options: dict):
    """What the target draws after every node with the noise of these positions [b, W]."""
    b, width = tree.tokens.shape
    keys = rng_keys.repeat_interleave(width)
    return draw_tokens(logits, params.for_rows(width), keys, positions.reshape(-1), **options).view(b, width)


FAULTS: dict[str, Verify] = {
    "none": healthy,
    "temperature one": temperature_one,
    "no filters": no_filters,
    "every draft accepted": every_draft_accepted,
    "one noise for a round": one_noise_for_a_round,
    "one key for all": one_key_for_all,
}


def register() -> None:
    """Entry point ``sglang.srt.plugins``: to be called before the worker's modules are imported."""
    switch = Path(os.environ["EAGLE_TEST_FAULT"])
    sampling.verify_tree = lambda *arguments, **options: FAULTS[switch.read_text()](*arguments, **options)


def install(folder: Path, module: str = "broken_verifier") -> dict[str, str]:
    """Write the entry point of a module of this folder, this one for example, into `folder`, with no fault chosen;
    returns the environment of the server."""
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nbroken = {module}:register\n")
    choose(folder, "none")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "EAGLE_TEST_FAULT": str(folder / "fault")}


def choose(folder: Path, fault: str) -> None:
    (folder / "fault").write_text(fault)
