"""Which environment has which engine, for benchmarks that drive engines inside their own process."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"sglang": ("SGLang", "env"), "vllm": ("vLLM", "env-vllm")}


def rounds_of(engine: str) -> Any:
    """The module that drives this engine. Raises UserError where this environment does not have it."""
    name, make = ENGINES[engine]
    if importlib.util.find_spec(engine) is None:
        raise UserError(
            f"{name} is not installed for {sys.executable}; run make {make} and use .venv-{engine}/bin/python"
        )
    return importlib.import_module(f"benchmarks.{engine}_rounds")


def documents_of_both(script: str, arguments: Sequence[str]) -> Iterator[str]:
    """What `script --engine ENGINE --json FILE` writes for each engine, in a process of that engine's environment."""
    for engine, (name, make) in ENGINES.items():
        here = importlib.util.find_spec(engine) is not None
        python = Path(sys.executable) if here else ROOT / f".venv-{engine}/bin/python"
        if not python.exists():
            raise UserError(f"there is no {python} for {name}: run make {make}, or ask for one engine with --engine")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "document.json"
            command = [str(python), script, *arguments, "--engine", engine, "--json", str(file)]
            if code := subprocess.run(command).returncode:
                raise UserError(f"the measurement with {name} ended with exit code {code}: what it printed says why")
            yield file.read_text(encoding="utf-8")
