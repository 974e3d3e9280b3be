"""What a round costs whose trees have different sizes: by `policy.costs`, for any number of target rows."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.roofline import H100
from benchmarks.simulate_targets import OVERLAPPED, TARGETS, Machine
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import Costs
from eagle_plugin.runtime import cost_files

REFERENCE = Shape(2, 4, 8)
SIMULATED = "H100, Llama-3.1-8B"


def simulated_costs() -> Costs:
    """The roofline of benchmarks/simulate_targets.py as tables: an H100 with Llama-3.1-8B and its EAGLE-3 head."""
    return Machine(H100, TARGETS["Llama-3.1-8B"], OVERLAPPED).costs()


def measured_costs(engine: str, target: str) -> tuple[str, Costs] | None:
    """The table that servers of this engine measured on this machine for a target in bf16, with what it is.

    Of several the one with the shortest time of one round: a busy machine only adds time. target: the last part of the
    name that the server was given. None: there is none in the plugin's cache folder.
    """
    found = []
    for path in cost_files.folder().glob("*.json"):
        try:
            key = json.loads(path.read_text(encoding="utf-8"))["key"]
            costs = cost_files.read(key)
        except (OSError, ValueError, KeyError, TypeError, cost_files.CostFileError):
            continue  # a server would measure again
        same = key["engine"].startswith(engine) and key["target"].rstrip("/").endswith(target)
        if costs is not None and same and key["dtype"] == "torch.bfloat16":
            name = f"{key['device']}, {key['threads']} threads, {key['engine']}"
            found.append((costs.round(REFERENCE, 32, 32_000), name, costs))
    return min(found, key=lambda entry: entry[0])[1:] if found else None


def round_seconds(costs: Costs, steps: int, topk: int, longest: int, rows: np.ndarray, b: int, context: int) -> float:
    """Mean seconds of rounds of b requests with `context` tokens each, whose targets read rows[i] rows altogether.

    longest: nodes of the largest tree that a request may get. Without drafts (steps 0) it is a plain round.
    """
    keys = b * context
    if steps == 0:
        return costs.round(PLAIN, b, keys)
    accepted = costs.extend.seconds(b, min(steps, longest - 1) + 1, keys)
    levels = (steps - 1) * costs.level.seconds(b, topk, keys)
    each, times = np.unique(rows, return_counts=True)
    curve = [costs.target.curve.at(int(n)) for n in each]
    per_key = costs.target.per_key + costs.target.per_key_and_row * each / b
    return float(np.average(np.array(curve) + keys * per_key, weights=times)) + accepted + levels + costs.fixed
