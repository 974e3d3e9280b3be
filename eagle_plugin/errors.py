"""The base of all errors that the command line prints as one line."""


class UserError(Exception):
    """What was asked cannot be done: one sentence with the thing, what was found, what was wanted and the fix."""


def json_fault(error: Exception) -> str:
    """What is wrong with a text that `json.loads` refused: "is not JSON (...)", or "is nested too deeply"."""
    return "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON ({error})"
