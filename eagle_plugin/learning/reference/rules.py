"""Lossless rules for a draft tree at temperature > 0: how children are chosen and how they are verified.

`target_only`: the most likely tokens, compared with one draw of the target. `sampled_child`: the product's rule, see
`core.propose`. `recursive_rejection`: every child is drawn, without replacement (SpecInfer, arXiv 2305.09781; Jeon et
al., arXiv 2402.14160); it is here for comparison only. `gumbel`: draft and target share the noise of their draws, see
`core.gumbel`. At temperature 0 all are `target_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.gumbel import SHARPNESS, propose, verify_tree
from eagle_plugin.core.propose import MAX_TOP_M, NUM_SAMPLED, SLOT_WEIGHTS, Children, Proposals, propose, tempered
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted, verify_tree

WHOLE_VOCABULARY = 1 << 30


class Rule(NamedTuple):
    """How a rule chooses children and verifies a tree."""

    # (logp, index, params, generator, topk, positions=, **place), see `core.propose.propose`; positions [R]: of the
    # nodes whose children these are.
    propose: Callable[..., Children]
    verify: Callable[[DraftTree, Tensor, SamplingParams, Proposals, Tensor, int, Tensor], Accepted]  # .., E, roots [b]
    children: Callable[[int], int]  # topk -> children of a node
    top_m: int  # how many of the head's most likely tokens `propose` is given


def verify_anywhere(
    tree: DraftTree, logits: Tensor, params: SamplingParams, proposals: Proposals, u: Tensor, longest: int, _: Tensor
) -> Accepted:
    """`verify_tree`, which draws by the numbers that it is given, wherever the roots are."""
    return verify_tree(tree, logits, params, proposals, u, longest)


def propose_target_only(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    gen: torch.Generator,
    topk: int,
    *,
    positions: Tensor,
    **place: object,
) -> Children:
    """The topk most likely tokens, scored at temperature 1 (EAGLE-2)."""
    greedy = params._replace(top_ks=torch.ones_like(params.top_ks))
    children = propose(logp, index, greedy, torch.zeros(len(logp), NUM_SAMPLED, dtype=torch.float64), topk, **place)  # type: ignore[arg-type]
    return children._replace(**{name: getattr(children, name)[:, :topk] for name in ("logp", "tokens", "draws")})


def sampled_child(slot_weights: Sequence[float] = SLOT_WEIGHTS) -> Rule:
    """The topk most likely tokens and one drawn from the rest for each slot weight: the product's rule."""

    def propose_sampled_child(
        logp: Tensor,
        index: Tensor,
        params: SamplingParams,
        gen: torch.Generator,
        topk: int,
        *,
        positions: Tensor,
        **place: Any,
    ) -> Children:
        u = torch.rand(len(logp), len(slot_weights), dtype=torch.float64, generator=gen)
        return propose(logp, index, params, u, topk, slot_weights=slot_weights, **place)

    return Rule(propose_sampled_child, verify_anywhere, lambda topk: topk + len(slot_weights), MAX_TOP_M)


def propose_recursive_rejection(
    logp: Tensor,
    index: Tensor,
    params: SamplingParams,
    gen: torch.Generator,
    topk: int,
    *,
    positions: Tensor,
    first_row: int,
    rows_per_request: int,
    draft_to_target: Tensor | None = None,
) -> Children:
    """Draw topk children from q without replacement, in the order of the draws; greedy rows get the most likely tokens.

    The largest log q + Gumbel noise are such a draw (Kool et al., arXiv 1903.06059, section 2.3). The i-th of them
    has the score of the i-th most likely token, which is known before the draw.
    """
    place = {"first_row": first_row, "rows_per_request": rows_per_request, "draft_to_target": draft_to_target}
    children = propose_target_only(logp, index, params, gen, topk, positions=positions, **place)
    q = tempered(logp, params.temperatures)
    q = q / q.sum(dim=1, keepdim=True)
    u = torch.rand(q.shape, dtype=torch.float64, generator=gen).clamp(min=torch.finfo(torch.float64).tiny)
    drawn = (q.log() - (-u.log()).log()).topk(topk, dim=1).indices
    tokens = index if draft_to_target is None else draft_to_target[index]
    rows = (first_row + torch.arange(len(q)) % rows_per_request).int()[:, None].expand(-1, topk)
    sampled = ~params.is_greedy()[:, None]
    order = tokens.argsort(dim=1)
    return Children(
        torch.where(sampled, q[:, :topk].log().float(), children.logp),
        torch.where(sampled, tokens.gather(1, drawn), children.tokens),
        torch.where(sampled, rows, children.draws),
        tokens.gather(1, order),
        torch.where(sampled, q, 0.0).float().gather(1, order),
    )


def gumbel(rng_keys: Tensor, sharpness: float = SHARPNESS) -> Rule:
    """The rule of `core.gumbel` for b requests with these keys [b] int64."""

    def propose_gumbel(
        logp: Tensor,
        index: Tensor,
        params: SamplingParams,
        gen: torch.Generator,
        topk: int,
        *,
        positions: Tensor,
        first_row: int,
        rows_per_request: int,
        draft_to_target: Tensor | None = None,
    ) -> Children:
        keys = rng_keys.repeat_interleave(rows_per_request)
        scores, tokens = propose(logp, index, params, keys, positions, topk, draft_to_target, sharpness)
        return Children(scores, tokens, torch.full_like(tokens, -1).int(), tokens[:, :0], scores[:, :0])

    def verify_gumbel(
        tree: DraftTree, logits: Tensor, params: SamplingParams, _: Proposals, __: Tensor, longest: int, roots: Tensor
    ) -> Accepted:
        return verify_tree(tree, logits, params, rng_keys, roots, longest)

    return Rule(propose_gumbel, verify_gumbel, lambda topk: topk, MAX_TOP_M)


RULES = {
    "target_only": Rule(propose_target_only, verify_anywhere, lambda topk: topk, MAX_TOP_M),
    "recursive_rejection": Rule(propose_recursive_rejection, verify_anywhere, lambda topk: topk, WHOLE_VOCABULARY),
    "sampled_child": sampled_child(),
}
