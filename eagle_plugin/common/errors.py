"""The base of all errors that the command line prints as one line."""

import re

from eagle_plugin.common.url_credentials import without_credentials

# Longer than any name of a file: a value of somebody's file, of which a sentence shows the beginning.
_LONG = re.compile(r"[^\s/]{256,}")
_SHOWN = 60  # characters
_BEGIN, _END = 2600, 900  # characters of a sentence that is longer: a list of a file can have any length
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # ends of lines among them


class UserError(Exception):
    """What was asked cannot be done: one sentence with the thing, what was found, what was wanted and the fix.

    It is one line, whatever the values in it, never shows the credentials of a URL, and of a very long value only the
    beginning.
    """

    def __str__(self) -> str:
        line = _CONTROL.sub(" ", without_credentials(super().__str__()))
        line = _LONG.sub(lambda found: f"{found[0][:_SHOWN]}...", line)
        return line if len(line) <= _BEGIN + _END else f"{line[:_BEGIN]} ... {line[-_END:]}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type if it says nothing: a message of a library may have many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def json_fault(error: Exception) -> str:
    """What is wrong with a text that `json.loads` refused: "is not JSON (...)", or "is nested too deeply"."""
    return "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON ({error})"
