"""How far a stage of a job is, in a small file that the job reads: the path is in EAGLE_PROGRESS_FILE.

Without that variable nothing is written: a sub-command that a user starts has its own progress bar.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import replace_file

VARIABLE = "EAGLE_PROGRESS_FILE"
EVERY_S = 0.5
_last = -EVERY_S


def report_progress(done: float, total: float | None, unit: str) -> None:
    """Record that `done` of `total` units are finished (None: unknown); at most twice per second, errors are ignored.

    A job must not fail because its progress cannot be written.
    """
    global _last
    path = os.environ.get(VARIABLE)
    if not path or time.monotonic() - _last < EVERY_S:
        return
    _last = time.monotonic()
    # No flush: a progress that a power cut loses is not missed.
    with contextlib.suppress(OSError), replace_file(Path(path), flush=False) as temporary:
        temporary.write_text(json.dumps({"done": done, "total": total, "unit": unit}), encoding="utf-8")


def read_progress(path: Path) -> dict[str, Any]:
    """What `report_progress` wrote last; empty if there is nothing yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
