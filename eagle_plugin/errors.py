"""The base of all errors that the command line prints as one line."""


class UserError(Exception):
    """What was asked cannot be done: one sentence with the thing, what was found, what was wanted and the fix."""
