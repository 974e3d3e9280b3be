"""Grammars along draft trees, in the process of vLLM's scheduler, which holds the grammars.

vLLM follows the grammar of a request along its drafted tokens as if they were a chain, to mask the logits after each.
The worker sends the parents of the drafted nodes along with the tokens, and the masks are those of the tree's nodes.
The functions go AROUND methods of vLLM's ``Scheduler`` and ``StructuredOutputManager``; requests without parents are
served as vLLM does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output.utils import strip_speculative_padding

_PARENTS = "eagle_plugin_parents"  # of the drafts, which travel with it, and of a vLLM ``Request``


def with_parents(drafts: DraftTokenIds, parents: Mapping[str, Sequence[int]]) -> DraftTokenIds:
    """The drafts of a step, with the parents of nodes 1 to W - 1 of the trees of requests with a grammar."""
    setattr(drafts, _PARENTS, dict(parents))
    return drafts


def note_parents(original: Any, scheduler: Any, drafts: DraftTokenIds, *more: Any) -> Any:
    """AROUND the arrival of drafts: each request keeps the parents of its newest."""
    parents = getattr(drafts, _PARENTS, {})
    for name in drafts.req_ids:
        if name in scheduler.requests:
            setattr(scheduler.requests[name], _PARENTS, parents.get(name))
    return original(scheduler, drafts, *more)


def keep_nodes(original: Any, manager: Any, request: Any, tokens: list[int]) -> list[int]:
    """AROUND the check of drafts, which cuts a chain before the first token that the grammar forbids.

    Of a tree all nodes stay: the mask of its parent keeps the verification from such a node.
    """
    kept: list[int] = tokens if _parents_of(request) is not None else original(manager, request, tokens)
    return kept


def mask_nodes(
    original: Any, manager: Any, requests: Mapping[str, Any], names: Sequence[str], scheduled: Mapping[str, list[int]]
) -> Any:
    """AROUND the masks of a step [rows, V / 32] int32: one row for each request's root, then for its drafted nodes.

    names: the requests with a grammar; scheduled: the drafted tokens of each request.
    """
    if all(_parents_of(requests[name]) is None for name in names):
        return original(manager, requests, names, scheduled)
    roots = original(manager, requests, names, {})  # the masks of a step without drafts
    # One row for each node; in newer releases as many for every request as it can have nodes.
    widths = [1 + len(scheduled.get(name, [])) for name in names]
    if len(roots) > len(names):
        widths = [len(roots) // len(names)] * len(names)
    masks, first = manager._grammar_bitmask.numpy(), 0
    for name, width in zip(names, widths, strict=True):
        tokens, rows = scheduled.get(name, []), masks[first : first + width]
        # A tree cut short has its first nodes. Beyond a tree is padding, and nothing else after a step without drafts:
        # the request still has the parents of an older tree then.
        parents = (_parents_of(requests[name]) or [])[: len(strip_speculative_padding(tokens))]
        grammar = requests[name].structured_output_request.grammar
        reached = _walk(name, grammar, manager._grammar_bitmask[first : first + width], tokens, parents)
        for node in set(range(width)) - reached:  # nobody looks at these: any mask will do
            rows[node] = rows[0]
        first += width
    return masks[:first]


def _walk(name: str, grammar: Any, masks: Tensor, tokens: list[int], parents: Sequence[int]) -> set[int]:
    """Fill the masks of the nodes that a grammar allows, each after the path to it; returns these nodes.

    grammar: a vLLM ``StructuredOutputGrammar``, which is left as it was; masks [at least W, V / 32] int32.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(node)
    bits, reached = masks.numpy(), set()

    def visit(node: int) -> None:
        reached.add(node)
        if grammar.is_terminated():
            bits[node] = -1  # the text has ended
            return
        grammar.fill_bitmask(masks, node)
        for child in children.get(node, ()):
            token = tokens[child - 1]
            # Asked for a forbidden token, a grammar logs an error.
            if bits[node, token >> 5] >> (token & 31) & 1 and grammar.accept_tokens(name, [token]):
                visit(child)
                grammar.rollback(1)

    visit(0)
    return reached


def _parents_of(request: Any) -> list[int] | None:
    return getattr(request, _PARENTS, None)
