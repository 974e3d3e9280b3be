"""Reads which synthetic acceptance SGLang's own variables or our table ask for."""

from __future__ import annotations

import os

from eagle_plugin.core.synthetic import Rates, SyntheticRates, rates_of_length, rates_of_normal
from eagle_plugin.runtime.synthetic import SyntheticError, read_rates
from eagle_plugin.traffic.settings import FOLDER

SETTING, METHOD = "SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"
METHODS = {"match-expected": rates_of_length, "multinomial": rates_of_normal}


def synthetic_rates(steps: int) -> SyntheticRates | None:
    """The rates that this process's environment asks for, of trees of `steps` levels; None where acceptance is real.

    SGLang draws one accept length for all requests of a batch, we draw one for each. Raises SyntheticError.
    """
    return read_rates(_engines_rates(steps), SETTING, bool(os.environ.get(FOLDER)))


def _engines_rates(steps: int) -> Rates | None:
    from sglang.srt.environ import envs

    length, method = envs.SGLANG_SIMULATE_ACC_LEN.get(), envs.SGLANG_SIMULATE_ACC_METHOD.get()
    if length <= 0:
        return None
    if method not in METHODS:
        raise SyntheticError(f"{METHOD} is {method!r}, wanted {' or '.join(METHODS)}")
    return METHODS[method](length, steps)
