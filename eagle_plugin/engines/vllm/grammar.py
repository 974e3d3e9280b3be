"""Grammars along draft trees, in the process of vLLM's scheduler, which holds the grammars.

vLLM follows the grammar of a request along its drafted tokens as if they were a chain, to mask the logits after each.
The worker sends the parents of the drafted nodes along with the tokens, and the masks are those of the tree's nodes.
The functions go AROUND methods of vLLM's ``Scheduler`` and ``StructuredOutputManager``; requests without parents are
served as vLLM does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.outputs import DraftTokenIds

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
    if manager._grammar_bitmask is None:
        config = manager.vllm_config
        rows = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
    masks, first = manager._grammar_bitmask.numpy(), 0
    for name in names:
        tokens, request = scheduled.get(name, []), requests[name]
        rows = masks[first : first + 1 + len(tokens)]
        # What is scheduled beyond a tree is padding, and a tree cut short has its first nodes.
        parents = (_parents_of(request) or [])[: len(tokens)]
        grammar = request.structured_output_request.grammar

        def fill(node: int, grammar: Any = grammar, first: int = first) -> None:
            manager._fill_bitmasks(((grammar, first + node, True),))

        reached = _walk(name, grammar, fill, tokens, parents, rows)
        for node in set(range(len(rows))) - reached:  # nobody looks at these: any mask will do
            rows[node] = rows[0]
        first += len(rows)
    return masks[:first]


def _walk(name: str, grammar: Any, fill: Any, tokens: list[int], parents: Sequence[int], masks: np.ndarray) -> set[int]:
    """Fill the masks of the nodes that a grammar allows, each after the path to it; returns these nodes.

    grammar: a vLLM ``StructuredOutputGrammar``, which is left as it was. fill(node): writes its present mask.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(node)
    reached = set()

    def visit(node: int) -> None:
        fill(node)
        reached.add(node)
        for child in children.get(node, ()):
            token = tokens[child - 1]
            # A grammar that is at its end masks nothing; one that is asked for a forbidden token logs an error.
            is_allowed = not grammar.is_terminated() and masks[node, token >> 5] >> (token & 31) & 1
            if is_allowed and grammar.accept_tokens(name, [token]):
                visit(child)
                grammar.rollback(1)

    visit(0)
    return reached


def _parents_of(request: Any) -> list[int] | None:
    return getattr(request, _PARENTS, None)
