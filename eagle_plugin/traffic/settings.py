"""What is captured and where, from the environment of the server."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.traffic.served import ServedTarget

FOLDER = "EAGLE_CAPTURE"
MODES = ("drop", "redact")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
SMALLEST_LIMIT = 10**6  # bytes
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?I?)B?", re.IGNORECASE)


class CaptureError(UserError):
    """A setting of the capture that cannot be used, or a writer that cannot start."""


@dataclass(frozen=True)
class CaptureSettings:
    """What is captured, and where it is written."""

    folder: str
    rate: float = 1.0  # share of the requests that are recorded
    limit: int = 10 * 10**9  # bytes of all segments together; then the oldest is removed
    privacy: str = "drop"  # one of `MODES`: what happens to records with private data
    recogniser: str | None = None  # "module:function" of the user, for more types of private data
    phone_regions: str | None = None  # codes of ISO 3166; None: those of `eagle-plugin data prepare`
    tokenizer: str | None = None  # folder of the target; with it token ids are kept, because they can be filtered
    python: str | None = None  # interpreter of the writer process; None: that of the server
    served: ServedTarget | None = None  # not a setting: the engine's adapter tells it

    def to_json(self) -> str:
        """The settings for the writer process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaptureSettings:
        """What `to_json` wrote."""
        values = json.loads(text)
        served = values.pop("served", None)
        return cls(**values, served=ServedTarget(**served) if served else None)


_NOT_VARIABLES = ("folder", "served")
NAMES = {f"{FOLDER}_{name.upper()}": name for name in CaptureSettings.__annotations__ if name not in _NOT_VARIABLES}


def capture_settings(environment: Mapping[str, str] = os.environ) -> CaptureSettings | None:
    """The settings in the environment; None where nothing is captured.

    Raises:
        CaptureError: naming the variable, what it holds and what is wanted.
    """
    unknown = sorted(name for name in environment if name.startswith(f"{FOLDER}_") and name not in NAMES)
    if unknown:
        raise CaptureError(f"{unknown[0]} is not a setting of the capture, wanted one of {', '.join(NAMES)}; unset it")
    folder = environment.get(FOLDER, "")
    if not folder:
        return None
    if not os.path.isabs(folder):
        raise CaptureError(f"{FOLDER} is {folder}, wanted a folder from the root on; write {os.path.abspath(folder)}")
    given: dict[str, Any] = {field: environment[name] for name, field in NAMES.items() if environment.get(name)}
    settings = CaptureSettings(
        folder,
        rate=_rate(given.pop("rate", "1")),
        limit=_limit(given.pop("limit", "10GB")),
        **given,
    )
    if settings.privacy not in MODES:
        raise CaptureError(
            f"{FOLDER}_PRIVACY is {settings.privacy}, wanted {' or '.join(MODES)}: nothing is written unfiltered"
        )
    python = settings.python or sys.executable
    if not os.access(python, os.X_OK):
        raise CaptureError(f"{FOLDER}_PYTHON is {python}, wanted the path of a Python interpreter")
    return settings


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise CaptureError(f"{FOLDER}_RATE is {text}, wanted the share of requests to record: above 0, at most 1")
    return rate


def _limit(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    limit = int(float(found[1]) * UNITS.get(found[2].upper(), 0)) if found else 0
    if limit < SMALLEST_LIMIT:
        raise CaptureError(f"{FOLDER}_LIMIT is {text}, wanted a size of 1MB or more, such as 500MB, 10GB or 2GiB")
    return limit
