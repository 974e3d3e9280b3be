"""Progress in a log, where a bar cannot be drawn: one line when a step begins, and one at every further 10 %."""

from __future__ import annotations

from typing import Any


class PercentLines:
    """Prints on a rich console; every step is known by its name."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._tenths: dict[str, int] = {}

    def __call__(self, what: str, share: float, details: str = "") -> None:
        """Tell that this share (0 to 1) of a step is done; details: what else the line says."""
        tenth = int(share * 10 + 1e-9)  # three of ten are 0.3, which is a little less
        if tenth > self._tenths.get(what, -1):
            self._tenths[what] = tenth
            text = f"{what}: {share:.0%}" + (f", {details}" if details else "")
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
