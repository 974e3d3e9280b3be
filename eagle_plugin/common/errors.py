"""The base of all errors that the command line prints as one line."""

from eagle_plugin.common.url_credentials import without_credentials


class UserError(Exception):
    """What was asked cannot be done: one sentence with the thing, what was found, what was wanted and the fix.

    It never shows the credentials of a URL.
    """

    def __str__(self) -> str:
        return without_credentials(super().__str__())


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type if it says nothing: a message of a library may have many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def json_fault(error: Exception) -> str:
    """What is wrong with a text that `json.loads` refused: "is not JSON (...)", or "is nested too deeply"."""
    return "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON ({error})"
