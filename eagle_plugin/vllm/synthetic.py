"""Reads which synthetic acceptance vLLM's own option or our table asks for."""

from __future__ import annotations

import os
from typing import Any

from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.runtime.synthetic import read_rates
from eagle_plugin.traffic.settings import FOLDER

SETTING = "rejection_sample_method: synthetic"


def synthetic_rates(speculative_config: Any) -> SyntheticRates | None:
    """The rates that a vLLM ``SpeculativeConfig`` or the environment asks for; None where acceptance is real.

    vLLM has a rate per drafted token of a chain; a tree has fewer levels than nodes, and takes the first of them.
    Raises SyntheticError.
    """
    is_on = speculative_config.rejection_sample_method == "synthetic"
    engines = tuple(speculative_config.synthetic_acceptance_rates) if is_on else None
    return read_rates(engines, SETTING, bool(os.environ.get(FOLDER)))
