"""Decides whether the plugin may touch an engine at all, and writes the start-up lines that say who serves.

It imports no torch and no engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import eagle_plugin
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape


class StartRefused(SystemExit, UserError):
    """The server does not start. Where nobody catches it, Python prints the one sentence without a traceback, and exits
    with 1; a program that makes an engine itself can catch it like any other error."""

    def __init__(self, error: UserError) -> None:
        super().__init__(f"eagle-plugin: {error}")


SWITCH = "EAGLE_PLUGIN"
# Why the launcher left the head to the engine's own worker, for the processes that it starts.
LEFT = "_EAGLE_PLUGIN_LEFT"
VALUES = ("1", "0", "force")
# What a process found of an untested release, for the processes that it starts: they need not look again.
_CHECKED = "_EAGLE_PLUGIN_CHECKED"


def switched_off() -> bool:
    """Whether the user asked for the engine alone: ``EAGLE_PLUGIN=0``."""
    return os.environ.get(SWITCH) == "0"


def forced() -> bool:
    """Whether the user asked for the plugin also in a release that it was not tested with: ``EAGLE_PLUGIN=force``."""
    return os.environ.get(SWITCH) == "force"


def may_serve(
    engine: str,
    installed: str,
    tested: Sequence[str],
    logger: logging.Logger,
    check: Callable[[], Sequence[object]],
) -> bool:
    """Whether to register with this engine; logs the reason where not.

    check: what the installed engine has otherwise than the plugin wants it (`runtime.engine_contract`), asked for only
    in a release that was not tested, under ``EAGLE_PLUGIN=force``.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in VALUES:
        logger.warning("eagle-plugin: %s is %r, wanted one of %s; taken as 1", SWITCH, value, ", ".join(VALUES))
    if switched_off():
        logger.info("eagle-plugin is switched off by %s=0", SWITCH)
        return False
    if installed.partition("+")[0] in tested:  # without the tag of a local build
        return True
    if not forced():
        logger.warning(
            "eagle-plugin %s leaves %s %s untouched: it was tested with %s %s only; install that version or a newer "
            "eagle-plugin, or try it as it is with %s=force",
            eagle_plugin.__version__, engine, installed, engine, ", ".join(tested), SWITCH,
        )  # fmt: skip
        return False
    return _serves_untested(engine, installed, tested, logger, check)


def _serves_untested(
    engine: str, installed: str, tested: Sequence[str], logger: logging.Logger, check: Callable[[], Sequence[object]]
) -> bool:
    release = f"{engine} {installed}"
    checked = os.environ.get(_CHECKED, "")
    if checked.startswith(f"{release}: "):
        return checked.endswith(": served")
    try:
        found = list(check())
    except (OSError, SyntaxError, ImportError) as error:
        found = [f"its source cannot be read: {error}"]
    os.environ[_CHECKED] = f"{release}: " + ("left" if found else "served")
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        logger.warning(
            "eagle-plugin %s leaves %s untouched although %s=force: %s%s; install %s %s or a newer eagle-plugin",
            eagle_plugin.__version__, release, SWITCH, found[0], more, engine, " or ".join(tested),
        )  # fmt: skip
        return False
    logger.warning(
        "eagle-plugin %s serves %s, with which it was not tested, because %s=force: the names that it touches are all "
        "there; it tests itself next, which does not show every fault",
        eagle_plugin.__version__, release, SWITCH,
    )  # fmt: skip
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
