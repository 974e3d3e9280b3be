"""Cases of a test for `make test` that have every pair of values; the others are in the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def half(*factors: Sequence[Any]) -> list[Any]:
    """All combinations of the values of several factors; those of an odd sum of places are left to the matrix."""
    cases = []
    for places in product(*(range(len(values)) for values in factors)):
        case = [values[place] for values, place in zip(factors, places, strict=True)]
        cases.append(pytest.param(*case, marks=[pytest.mark.matrix] if sum(places) % 2 else []))
    return cases
