"""Decides whether the plugin's worker serves, from the record of an earlier self-test or a new one; ranks alike."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_plugin.common.atomic_io import WriteError
from eagle_plugin.runtime.startup import SWITCH, forced
from eagle_plugin.selftest import record
from eagle_plugin.selftest.failure import LeftOut, failure

REMOVE = "after a repair run: eagle-plugin selftest --again"

Gather = Callable[[Any], list[Any]]  # a value of the host, of every rank, by rank


def is_asked_for(device_type: str) -> bool:
    """Whether a server on this kind of device tests itself: on a GPU always, on a CPU with ``EAGLE_SELFTEST=1``, and
    with ``EAGLE_PLUGIN=force``."""
    return device_type == "cuda" or forced() or os.environ.get("EAGLE_SELFTEST") == "1"


def decide(
    key: Mapping[str, Any],
    test: Callable[[], list[str]],
    gather: Gather,
    logger: logging.Logger,
    captured: Sequence[list[int]] = (),
) -> list[str]:
    """The reasons not to serve that a record of every rank has, else those of the test, which all ranks run and keep.

    Empty if the test has passed. What is `LeftOut` in any rank is no reason: it is logged, and the test is not kept as
    passed, so that the next start tries again. logger: of rank 0, silent in the others. captured: as of a `Record`; how
    many batch sizes have graphs depends on the memory that was free, and those of no earlier start are tested.
    """
    kept = record.read(key)
    if all(gather(kept is not None and kept.tells_of(captured))):
        assert kept is not None
        return told(agree(kept.reasons, gather))
    begin = time.perf_counter()
    try:
        found = test()
    except Exception as error:  # of any kind: what does not run is left to the engine as what is wrong
        found = [failure(key["part"], error)]
    everyones, seconds = gather(found), time.perf_counter() - begin
    left_out = _merged([[x for x in own if isinstance(x, LeftOut)] for own in everyones])
    reasons = _merged([[x for x in own if not isinstance(x, LeftOut)] for own in everyones])
    if left_out:
        logger.warning(
            "eagle-plugin: the self-test of the %s is not complete, the next start repeats it: %s; leave more memory "
            "of the device free",
            key["part"],
            _first(left_out),
        )
        if not reasons:
            return []
    passed = kept.captured if kept is not None and kept.passed else []
    keep(key, reasons, seconds, logger, [*passed, *(pair for pair in captured if pair not in passed)])
    if not reasons:
        logger.info("eagle-plugin: the self-test of the %s passed in %.1f s", key["part"], seconds)
    return told(reasons)


def keep(
    key: Mapping[str, Any],
    reasons: list[str],
    seconds: float,
    logger: logging.Logger,
    captured: Sequence[list[int]] = (),
) -> None:
    """Keep a result, if it can be written; else the log says so. captured: as of a `Record`."""
    try:
        record.write(key, reasons, seconds, captured)
    except WriteError as error:
        logger.warning("eagle-plugin: the result of the self-test is not kept, every start will repeat it: %s", error)


def keep_failure(key: Mapping[str, Any], reasons: list[str], logger: logging.Logger) -> None:
    """Keep why rounds failed outside of a test, so that the next start does not try them again; `LeftOut` is not kept:
    with more memory they may run."""
    if kept := [reason for reason in reasons if not isinstance(reason, LeftOut)]:
        keep(key, kept, 0.0, logger)


def next_start(key: Mapping[str, Any] | None, gather: Gather, engine: str) -> str:
    """What to do after a start that failed, for the end of its error: by what the record of any rank has now.

    key: None where no start reads a record. engine: the name of the one whose own worker serves then.
    """
    kept = None if key is None else record.read(key)
    if any(gather(kept is not None and not kept.passed)):
        # A container that starts anew has lost the record, if nothing keeps the folder.
        return f"start the server again, with {record.folder()} kept: from now on it is served by {engine}'s own worker"
    return f"start the server with {SWITCH}=0: then it is served by {engine}'s own worker"


def agree(reasons: list[str], gather: Gather) -> list[str]:
    """The reasons of all ranks, each once; one that not all ranks have is told with its ranks."""
    return _merged(gather(reasons))


def _merged(everyones: list[list[str]]) -> list[str]:
    merged = []
    for reason in dict.fromkeys(reason for own in everyones for reason in own):
        ranks = [rank for rank, own in enumerate(everyones) if reason in own]
        merged.append(reason if len(ranks) == len(everyones) else f"rank {', '.join(map(str, ranks))}: {reason}")
    return merged


def told(reasons: list[str]) -> list[str]:
    """The reasons as the log names them: which test, and how a record of it is removed."""
    if not reasons:
        return []
    return [f"the self-test failed: {_first(reasons)}; {REMOVE}"]


def _first(sentences: list[str]) -> str:
    more = f" (and {len(sentences) - 3} more)" if len(sentences) > 3 else ""
    return f"{'; '.join(sentences[:3])}{more}"
