"""Makes the policy of a starting server: reads its costs from disk, or measures them once and keeps them there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_plugin.common.atomic_io import WriteError
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import CostModel, Costs
from eagle_plugin.policy.policy import Policy
from eagle_plugin.runtime import cost_files
from eagle_plugin.runtime.cost_files import CostFileError

PREFIX_TOKENS = 256  # of each request in the log line of the first choices


def start_policy(
    caps: Shape,
    key: Mapping[str, Any],
    measure: Callable[[], Costs],
    logger: logging.Logger,
    shapes: Sequence[Shape] | None = None,
    is_faster_than: Callable[[Costs], bool] = lambda costs: False,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    padded: Callable[[int, Shape], int] = lambda b, shape: b,
) -> Policy:
    """The policy with the costs of this key (`cost_files.key_of`); `measure` is called where none are kept.

    shapes: as for `Policy`. is_faster_than(costs): whether kept costs were measured on a busy machine; they are then
    measured again. gather: the value that each rank gives, by rank; all take the costs of rank 0, to choose alike.
    padded: as for `CostModel`.

    Logs one line that says where the costs are from and which shapes they lead to; another one where a file cannot be
    read or written.
    """
    kept, source = None, "the costs of a round were measured at an earlier start"
    try:
        kept = cost_files.read(key)
    except CostFileError as error:
        logger.warning("eagle-plugin: %s", error)
    everyones = gather(kept)
    costs: Costs = everyones[0]
    if None in everyones or any(gather(is_faster_than(costs))):
        began = time.perf_counter()
        costs = gather(measure())[0]
        source = f"measured the costs of a round in {time.perf_counter() - began:.1f} s"
        try:
            cost_files.write(key, costs)
        except WriteError as error:
            logger.warning("eagle-plugin: the costs of a round are not kept, every start will measure them: %s", error)
    policy = Policy(caps, CostModel(costs, padded), shapes)
    logger.info("eagle-plugin: %s; %s", source, first_choices(policy))
    return policy


def first_choices(policy: Policy) -> str:
    """A log line: what a policy that has seen no request yet would choose."""
    chosen = []
    for b in (1, 8, 32):
        rates = policy.rates(b, b * PREFIX_TOKENS)
        best = max(rates, key=rates.__getitem__)
        chosen.append(f"{best} ({rates[best] / rates[PLAIN]:.2f}x of plain decoding) for {b}")
    return f"of a typical head the policy expects, as steps/topk/width: {', '.join(chosen)} requests"
