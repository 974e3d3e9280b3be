"""Turns an exception of a test into a sentence: that something is wrong, or that no memory was left to find out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eagle_plugin.common.device_memory import is_out_of_memory

NO_MEMORY = "no memory was left for this check"


class LeftOut(str):
    """One sentence about a check for which no memory was left: no difference, and never kept in a record."""


def failure(what: str, error: Exception) -> str:
    """One sentence about a check that raised, `LeftOut` where it ran out of memory; what: the check.

    An exception of any other kind is as bad as a result that differs.
    """
    if is_out_of_memory(error):
        return LeftOut(f"{what}: {NO_MEMORY}")
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{what}: {type(error).__name__}: {first}"


def without_memory(check: Callable[[], list[str]]) -> list[str]:
    """What a check found, one sentence per thing that differs; `LeftOut` if it ran out of memory."""
    try:
        return check()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return [failure(check.__name__.replace("_", " "), error)]


def differences_of_batches(batches: Iterable[tuple[str, Callable[[], list[str]]]]) -> list[str]:
    """One sentence per thing that differs in any batch, each once; batches: what each is called, and its test."""
    reasons: dict[str, None] = {}
    for what, test in batches:
        try:
            found = test()
        except Exception as error:  # of any kind: a round that does not run is as bad as one that differs
            found = [failure(what, error)]
        reasons |= dict.fromkeys(found)
    return list(reasons)
