"""Whether the plugin may touch an engine at all, and the start-up lines that say who serves. No torch, no engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import eagle_plugin
from eagle_plugin.core.shape import Shape
from eagle_plugin.errors import UserError


class StartRefused(SystemExit, UserError):
    """The server does not start. Where nobody catches it, Python prints the one sentence without a traceback, and exits
    with 1; a program that makes an engine itself can catch it like any other error."""

    def __init__(self, error: UserError) -> None:
        super().__init__(f"eagle-plugin: {error}")


def switched_off() -> bool:
    """Whether the user asked for the engine alone: ``EAGLE_PLUGIN=0``."""
    return os.environ.get("EAGLE_PLUGIN", "1") == "0"


def may_serve(engine: str, installed: str, tested: Sequence[str], logger: logging.Logger) -> bool:
    """Whether to register with this engine; logs the reason where not."""
    if switched_off():
        logger.info("eagle-plugin is switched off by EAGLE_PLUGIN=0")
        return False
    if installed.partition("+")[0] not in tested:  # without the tag of a local build
        logger.warning(
            "eagle-plugin %s leaves %s %s untouched: it was tested with %s %s only; "
            "install that version or a newer eagle-plugin",
            eagle_plugin.__version__,
            engine,
            installed,
            engine,
            ", ".join(tested),
        )
        return False
    return True


def plugin_serves(algorithm: str, shape: Shape, kernels: str) -> str:
    """The start-up line of a server on the plugin; the benchmark looks for it."""
    steps, topk, width = shape
    return (
        f"eagle-plugin {eagle_plugin.__version__}: {algorithm} is served by the plugin's draft trees "
        f"(at most {steps} steps, {topk} children per node, {width} nodes; {kernels} kernels)"
    )


def engine_serves(algorithm: str, engine: str, reasons: Sequence[str]) -> str:
    """The start-up line of a server on the engine's own speculation."""
    return f"eagle-plugin {eagle_plugin.__version__}: {algorithm} is served by {engine}'s own worker: " + "; ".join(
        reasons
    )
