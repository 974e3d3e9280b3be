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

from eagle_plugin.core.sampling import SamplingParams, draw, target_distribution
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import sampling
from eagle_plugin.kernels.sampling import Proposals

Verify = Callable[[DraftTree, Tensor, SamplingParams, Proposals, Tensor, int], Accepted]
healthy: Verify = sampling.verify_tree


def temperature_one(tree, logits, params, proposals, uniforms, max_accept_length):
    broken = params._replace(temperatures=torch.ones_like(params.temperatures))
    return healthy(tree, logits, broken, proposals, uniforms, max_accept_length)


def no_filters(tree, logits, params, proposals, uniforms, max_accept_length):
    off = SamplingParams.of(len(params.top_ks))
    broken = off._replace(temperatures=params.temperatures, top_ks=off.top_ks.where(params.top_ks > 1, 1))
    return healthy(tree, logits, broken, proposals, uniforms, max_accept_length)


def every_draw_accepted(tree, logits, params, proposals, uniforms, max_accept_length):
    """As if u * q'(s) < p(s) always held."""
    broken = proposals._replace(weights=proposals.weights * 1e-20)
    return healthy(tree, logits, params, broken, uniforms, max_accept_length)


def one_number_for_both(tree, logits, params, proposals, uniforms, max_accept_length):
    """The number that rejected the sampled child also draws from the rest."""
    broken = uniforms[..., :1].expand_as(uniforms).contiguous()
    return healthy(tree, logits, params, proposals, broken, max_accept_length)


def whole_p_after_rejection(tree, logits, params, proposals, uniforms, max_accept_length, roots=None):
    """After a rejection x is drawn from p and not from what q' left of it. Trees of temperature > 0 only."""
    b, width = tree.tokens.shape
    out = Accepted(
        torch.full((b, max_accept_length), -1, dtype=torch.int32),
        torch.zeros(b, dtype=torch.int32),
        torch.zeros(b, max_accept_length, dtype=torch.int64),
    )
    p = target_distribution(logits, params.for_rows(width))
    for i in range(b):
        node, step = 0, 0
        while True:
            out.index[i, step] = node
            children = (tree.parents[i] == node).nonzero()[:, 0].tolist() if step + 1 < max_accept_length else []
            row, numbers = p[i * width + node], uniforms[i, step].tolist()
            token, child, left = draw(row, numbers[-1]), None, 1.0  # left: of q', without the children before
            for c in children:
                drawn = int(tree.draws[i, c])
                if drawn < 0:
                    child = c if int(tree.tokens[i, c]) == token and child is None else child
                    continue
                q = float(proposals.weights[i, drawn][proposals.tokens[i, drawn] == tree.tokens[i, c]].sum())
                if numbers.pop(0) * q / left < row[tree.tokens[i, c]]:
                    token, child = int(tree.tokens[i, c]), c
                    break
                left -= q
            out.tokens[i, step] = token
            step += 1
            if child is None:
                break
            node = child
        out.lengths[i] = step
    return out


FAULTS: dict[str, Verify] = {
    "none": healthy,
    "temperature one": temperature_one,
    "no filters": no_filters,
    "every draw accepted": every_draw_accepted,
    "one number for both": one_number_for_both,
    "whole p after rejection": whole_p_after_rejection,
}


def register() -> None:
    """Entry point ``sglang.srt.plugins``: to be called before the worker's modules are imported."""
    switch = Path(os.environ["EAGLE_TEST_FAULT"])
    sampling.verify_tree = lambda *arguments, filters: FAULTS[switch.read_text()](*arguments)  # "joint" is the default


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
