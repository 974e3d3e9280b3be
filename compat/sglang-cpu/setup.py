"""Refuses the build where a real package of the same names is visible; everything else is in pyproject.toml."""

import runpy
import sys
from pathlib import Path

from setuptools import setup

# An isolated build sees no installed package, so the same check runs again at every import and at the entry point.
conflicts = runpy.run_path(str(Path(__file__).parent / "src" / "eagle_sglang_cpu" / "conflicts.py"))
message = conflicts["conflict_message"]()
if message:
    sys.exit(f"error: {message}")

setup()
