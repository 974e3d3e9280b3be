"""The base of all errors that the command line prints as one line."""

import re

from eagle_plugin.common.url_credentials import without_credentials

# Longer than any name of a file: a value of somebody's file, of which a sentence shows the beginning.
_LONG = re.compile(r"[^\s/]{256,}")
_SHOWN = 60  # characters


class UserError(Exception):
    """What was asked cannot be done: one sentence with the thing, what was found, what was wanted and the fix.

    It never shows the credentials of a URL, and of a very long value only the beginning.
    """

    def __str__(self) -> str:
        return _LONG.sub(lambda found: f"{found[0][:_SHOWN]}...", without_credentials(super().__str__()))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type if it says nothing: a message of a library may have many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def json_fault(error: Exception) -> str:
    """What is wrong with a text that `json.loads` refused: "is not JSON (...)", or "is nested too deeply"."""
    return "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON ({error})"
