"""Draws random trees, and compares a tree in one forward of a target with its paths token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree

# Relative differences of a row of logits. A tree in one forward and its paths run products of other sizes, and in 16
# bits every layer adds to that.
OTHER_SIZES = {torch.float32: 5e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# The same of a target that rounds the inputs of its products to 8 or 4 bits: a difference that is far below such a step
# moves a value by a whole step where it is near the middle between two. A target whose logits moved by this much in all
# rows could not be used; a wrong mask moves them by about 1 where trees are long beside what is before them.
ROUNDED_INPUTS = 0.5
# Names of the engines for formats that round weights alone; any other may round inputs too.
WEIGHTS_ALONE = (
    *("auto-round", "auto_awq", "auto_gptq", "awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin"),
    *("experts_int8", "humming", "int8_per_channel_weight_only", "moe_wna16", "petit_nvfp4"),
)
# Rows of a tree that may be further off: a mixture of experts sends a row elsewhere where two of its experts are nearly
# equal. A wrong mask or position changes the rows of nearly all nodes.
ROWS_ELSEWHERE = 0.1
PATHS = 3  # of a tree, token by token
Pairs = list[tuple[Tensor, Tensor]]  # logits [b, V]: at once, and token by token


def random_tree(roots: Tensor, shape: Shape, vocabulary: int, generator: torch.Generator) -> DraftTree:
    """Trees of one random form and different tokens, as deep as the shape allows, on the device of roots [b] int64.

    generator: on the CPU, so that ranks on different devices draw the same.
    """
    width, parents, depths = shape.width, [-1], [0]
    ancestors = [1]
    for node in range(1, width):
        # A chain of the greatest depth first, then children of any node that is not too deep.
        parent = node - 1 if node <= shape.steps else int(torch.randint(0, node, (), generator=generator))
        while depths[parent] >= shape.steps:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
        bits = ancestors[parent] | 1 << node
        ancestors.append(bits - 2**64 if bits >= 2**63 else bits)
    tree = DraftTree.padding(roots, width)
    tokens = torch.randint(0, vocabulary, (len(roots), width - 1), generator=generator)
    tree.tokens[:, 1:] = tokens.to(roots.device)
    for values, one in ((tree.parents, parents), (tree.depths, depths), (tree.ancestors, ancestors)):
        values.copy_(torch.tensor(one, device=roots.device).to(values.dtype))
    return tree


def paths_of(parents: list[int]) -> list[list[int]]:
    """The paths from the root to the deepest leaf and to the last ones; parents: of each node, -1 of the root."""
    leaves = [node for node in range(len(parents)) if node not in parents]
    paths = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    paths.sort(key=len, reverse=True)
    return paths[:1] + paths[1:][-(PATHS - 1) :]


def along(path: list[int], tree: DraftTree, at_once: Tensor, token: Callable[[Tensor, int], Tensor]) -> Pairs:
    """The logits of a path's nodes in one forward, at_once [b, W, V], and token by token.

    token: the logits [b, V] after tokens [b] so many positions after the root, whose path is in the cache.
    """
    return [(at_once[:, node], token(tree.tokens[:, node], depth)) for depth, node in enumerate(path)]


def allowed_difference(dtype: torch.dtype, quantization: str | None = None) -> float:
    """Of a row of logits of a model of this type, relative to its size; quantization: the engine's name for how it is
    quantised."""
    allowed = OTHER_SIZES[dtype]
    return allowed if quantization is None or quantization in WEIGHTS_ALONE else max(allowed, ROUNDED_INPUTS)


def logits_differ(what: str, pairs: Pairs, allowed: float) -> list[str]:
    """One sentence if the logits [b, V] of too many nodes differ.

    pairs: (at once, token by token) of each node of some paths; allowed: `allowed_difference`.
    """
    found, wanted = (torch.cat(values).float() for values in zip(*pairs, strict=True))
    off = relative_difference(*(x - x.mean(dim=1, keepdim=True) for x in (found, wanted)))
    count = int((~(off <= allowed)).sum())
    if count <= ROWS_ELSEWHERE * len(off):
        return []
    worst = float(off.nan_to_num(nan=torch.inf).max())
    return [
        f"{what}: the logits of {count} of {len(off)} nodes differ from those of their paths token by "
        f"token, by {worst:.2g} of their size where {allowed:.2g} is allowed"
    ]


def relative_difference(found: Tensor, wanted: Tensor) -> Tensor:
    """The size of the difference of each row, relative to that of the row, [n]."""
    return (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
