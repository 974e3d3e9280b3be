"""The slots of each request that the engine reserves for a decode step, once our worker serves for good."""

from __future__ import annotations

from typing import Any

_needed: int | None = None  # by a round; None: the engine's own worker serves, or may yet


def reserve_for(worker: Any) -> None:
    """Reserve no more in this process than the rounds of a `TreeWorker` need, which serves from now on.

    The pool and the rows of its table are made before, with room for the engine's own worker. For block drafters the
    engine has another rule.
    """
    global _needed
    if worker.draft_worker.levels.block is None:
        caps = worker.shape
        _needed = max(caps.steps * caps.topk, caps.width)


def slots_of_round(engines: int) -> int:
    """How many slots a decode step needs; engines: the engine's own number.

    With pages of one token that is max(steps * topk, width), and the engine reserves twice as many after the tokens
    that its host knows of: one part for what the last round accepts, the other for the next one. With larger pages it
    has whole pages for each branch of a tree, where its draft worker writes. Our rounds write their slots side by side
    in the order of a request's row of the table, `Shape.reach` of them and never more than that number, whatever the
    size of a page.
    """
    return engines if _needed is None else min(engines, _needed)
