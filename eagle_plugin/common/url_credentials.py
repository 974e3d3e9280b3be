"""Credentials in URLs, which are shown and recorded nowhere: `http://user:password@host` is `http://***@host`."""

from __future__ import annotations

import json
import re
from typing import Any

# The user of a URL, with a password or without one: a token can be there alone. And the parameters that sign a URL.
_USER = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
_PARAMETER = re.compile(
    r"(?<=[?&])([\w.-]*(?:signature|sig|token|key|secret|password|credential))=[^\s&#'\"<>]+", re.IGNORECASE
)
HIDDEN = "***"


def without_credentials(text: str) -> str:
    """The text with `***` for the credentials of each URL in it."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\1={HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def without_credentials_in(values: Any) -> Any:
    """The same for all texts of a value of JSON."""
    return json.loads(without_credentials(json.dumps(values)))
