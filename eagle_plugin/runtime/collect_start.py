"""Refuses a start with ``EAGLE_FEATURES`` where the plugin's worker does not serve: nothing would be stored."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_plugin.collect.settings import STORE, CollectError, collect_settings
from eagle_plugin.runtime.startup import StartRefused

NO_HEAD = "it has no draft head of the plugin (an untrained one will do: docs/data.md#collecting)"


def check_collecting(reasons: Sequence[str] = ()) -> None:
    """Check the settings, if there are any; reasons: why another worker serves.

    Raises:
        StartRefused: the settings are wrong, or there are reasons.
    """
    try:
        if collect_settings() is not None and reasons:
            raise CollectError(
                f"{STORE} is set, and this server cannot store hidden states: {'; '.join(reasons)}; correct that, or "
                f"unset {STORE}"
            )
    except CollectError as error:
        raise StartRefused(error) from None
