"""Reads whether acceptance is synthetic, in both engines: for benchmarks of what a round costs.

It is on only if the user names rates: by the engine's own setting, or by a table of shapes in this variable. Without
a table that can be read the server does not start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.core.synthetic import Rates, SyntheticRates

VARIABLE = "EAGLE_SYNTHETIC_ACCEPTANCE"
WARNING = (
    "eagle-plugin: SYNTHETIC ACCEPTANCE (%s): how many drafts are accepted is drawn from given rates, for benchmarks "
    "only; the text means nothing"
)
_FORM = "STEPS/TOPK/WIDTH=RATE,RATE..., with ; between two of them, such as 3/4/16=0.8,0.6,0.4;1/4/5=0.8"


class SyntheticError(UserError):
    """A setting of synthetic acceptance that cannot be served."""


def read_rates(
    engines: Rates | None, setting: str, is_captured: bool, environment: Mapping[str, str] = os.environ
) -> SyntheticRates | None:
    """The rates that the user set; None where acceptance is real, which is the default.

    engines: by the engine's own setting, whose name is `setting`; None where it is not used. is_captured: whether the
    server records its traffic.

    Raises:
        SyntheticError: a table that cannot be read, two settings at once, or traffic that would be recorded.
    """
    text = environment.get(VARIABLE, "")
    if not text and engines is None:
        return None
    name = VARIABLE if text else setting
    if text and engines is not None:
        raise SyntheticError(f"{VARIABLE} and {setting} are both set, wanted one of them: unset the other one")
    if is_captured:
        raise SyntheticError(
            f"{name} makes text that means nothing, and EAGLE_CAPTURE would record it for training: unset one of them"
        )
    return SyntheticRates((), engines or ()) if engines is not None else SyntheticRates(tuple(parse_rates(text)))


def source_of(rates: SyntheticRates, setting: str) -> str:
    """The name of the setting that these rates come from."""
    return VARIABLE if rates.of_shapes else setting


def parse_rates(text: str) -> list[tuple[Shape, Rates]]:
    """The table of the variable. Raises SyntheticError."""
    table: dict[Shape, Rates] = {}
    for entry in text.split(";"):
        shape, rates = _parse_entry(entry.strip())
        if shape in table:
            raise SyntheticError(f"{VARIABLE} has {shape} twice, wanted each shape once: remove one of the two")
        table[shape] = rates
    return list(table.items())


def format_rates(rates: Mapping[Shape, Rates]) -> str:
    """A table as the variable takes it."""
    return ";".join(f"{shape}=" + ",".join(f"{rate:.4f}" for rate in values) for shape, values in rates.items())


def _parse_entry(entry: str) -> tuple[Shape, Rates]:
    found = re.fullmatch(r"(\d{1,2})/(\d{1,2})/(\d{1,2})=([0-9.,]+)", entry)
    if found is None:
        raise SyntheticError(f"{VARIABLE} has {entry!r}, wanted {_FORM}")
    shape = Shape(*(int(number) for number in found.groups()[:3]))
    if not (shape.steps and shape.topk and 2 <= shape.width <= MAX_WIDTH):
        raise SyntheticError(f"{VARIABLE} has the shape {shape}, wanted drafts and 2 to {MAX_WIDTH} nodes")
    try:
        rates = tuple(float(rate) for rate in found[4].split(","))
    except ValueError:
        raise SyntheticError(f"{VARIABLE} has {entry!r}, wanted {_FORM}") from None
    if len(rates) != shape.max_accept_length - 1:
        raise SyntheticError(
            f"{VARIABLE} has {len(rates)} rates for {shape}, wanted {shape.max_accept_length - 1}: one per level"
        )
    if max(rates) > 1 or list(rates) != sorted(rates, reverse=True):
        raise SyntheticError(
            f"{VARIABLE} has the rates {found[4]} for {shape}, wanted probabilities that do not increase: entry i is "
            "that of accepting i drafted tokens or more"
        )
    return shape, rates
