"""The folder of what is kept between runs: models, first-use builds, measured costs, results of the self-test."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "EAGLE_CACHE_DIR"


def cache_folder() -> Path:
    """EAGLE_CACHE_DIR, or eagle-plugin in XDG_CACHE_HOME, which is ~/.cache where it is not set."""
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle-plugin"
