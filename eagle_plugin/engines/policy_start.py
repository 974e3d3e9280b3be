"""The policy of a starting server: its costs are read from disk, or measured once and kept there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from eagle_plugin.atomic_io import WriteError
from eagle_plugin.core.costs import CostModel, Costs
from eagle_plugin.core.policy import Policy
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.engines import cost_files
from eagle_plugin.engines.cost_files import CostFileError

SHOWN = (1, 8, 32)  # requests whose shape the start-up line names
SHOWN_KEYS = 256  # tokens of the prefix of each of them


def start_policy(
    caps: Shape, key: Mapping[str, Any], measure: Callable[[], Costs], logger: logging.Logger, most_requests: int
) -> Policy:
    """The policy with the costs of this key (`cost_files.key_of`); `measure` is called where none are kept.

    Logs one line that says where the costs are from and which shapes they lead to; another one where a file cannot be
    read or written.
    """
    costs, source = None, "read"
    try:
        costs = cost_files.read(key)
    except CostFileError as error:
        logger.warning("eagle-plugin: %s", error)
    if costs is None:
        began = time.perf_counter()
        costs = measure()
        source = f"measured in {time.perf_counter() - began:.1f} s"
        try:
            cost_files.write(key, costs)
        except WriteError as error:
            logger.warning("eagle-plugin: the costs of a round are measured at every start: %s", error)
    policy = Policy(caps, CostModel(costs))
    logger.info("eagle-plugin: the costs of a round were %s; %s", source, first_choices(policy, most_requests))
    return policy


def first_choices(policy: Policy, most_requests: int) -> str:
    """Which shapes the policy would choose for a head of which nothing is known yet."""
    choices = []
    for b in SHOWN:
        if b <= max(most_requests, 1):
            rates = policy.rates(b, b * SHOWN_KEYS)
            best = max(rates, key=rates.__getitem__)
            choices.append(f"{'plain decoding' if best == PLAIN else best} for {b}")
    return f"with an average head they lead to {', '.join(choices)} request{'s' if choices[1:] else ''}"
