"""`eagle-plugin deploy`: another draft head for a running server, and back if it accepts less."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.deploy_folder import COUNTS, FOLDER
from eagle_plugin.common.progress import progress_bar
from eagle_plugin.heads.checkpoint import check_fits, check_head, check_values
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.same_form import check_same_form
from eagle_plugin.heads.suspicions import suspicions
from eagle_plugin.learning.deploy.counts import Counts, CountsError, served_counts
from eagle_plugin.learning.deploy.server import DeployError, ServedHead
from eagle_plugin.learning.deploy.verdict import FEWEST_ROUNDS, Comparison, compare
from eagle_plugin.models import head_folder

LOOK_EVERY = 2.0  # seconds between two looks at the metrics
EPILOG = """\
examples:
  mkdir -m 700 /run/deploy
  EAGLE_DEPLOY=/run/deploy python -m sglang.launch_server ... --enable-metrics
  eagle-plugin deploy out/head/head --server http://127.0.0.1:30000 --folder /run/deploy
  eagle-plugin deploy out/head/head --server http://127.0.0.1:30000 --no-watch

The server loads the head between two rounds; running requests go on, and their texts do not depend on the head. Then
the accept lengths of the traffic with both heads are compared: if the new head's are lower (a one-sided test of level
1 %), the server gets the old head back.

exit codes: 0 the new head serves, 1 it accepted less and the old one serves again, 2 refused: the old one serves, or
the last lines say which one, if the server or the watch failed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exchange the head of a server; returns an exit code of EPILOG, raises UserError for anything refused."""
    options = _parse(argv)
    head = head_folder(options.head)
    server = ServedHead(options.folder, options.server)
    served = server.read()
    for warning in _check(served, head):
        print(f"warning: {warning}", file=sys.stderr)
    check_same_form(served["head"], head)
    with server.alone():
        return _deploy(options, server, head)


def _check(served: Mapping[str, Any], head: Path) -> list[str]:
    """Warnings about the new head, before the server is asked, which checks it by the rules of its engine.

    Raises:
        HeadError: it does not fit the target.
    """
    if served["engine"] == "sglang":
        return list(check_head(served["target"], head, algorithm=served["algorithm"]).warnings)
    described = read_head(head)
    check_fits(served["target"], described)
    check_values(described)
    return suspicions(described, served["target"])


def _deploy(options: argparse.Namespace, server: ServedHead, head: Path) -> int:
    old = Path(server.read()["head"])
    before = None if options.no_watch else _before(options, server)
    seconds = server.exchange(head, lambda waited: _say(options, f"waiting for the server, {waited:.0f} s"))
    _remember(options, server)
    result: dict[str, Any] = {"head": str(head.absolute()), "before": str(old), "seconds": seconds, "serves": "new"}
    _say(options, f"{head} serves; the rounds waited for {seconds:.1f} s")
    if before is not None and (found := _watch(options, server, before, head)) is not None:
        result |= {"accept_length_before": found.before, "accept_length_after": found.after, "z": found.z}
        verdict = f"accept length {found.before:.2f} with the old head, {found.after:.2f} with the new one"
        if found.is_worse:
            _go_back(server, old, head, verdict)
            _remember(options, server)
            result["serves"] = "old"
            _say(options, f"{verdict}: worse, so the old head {old} serves again")
        else:
            _say(options, f"{verdict}: {'not worse' if found.enough else 'too few rounds to tell'}, it stays")
    if options.json:
        print(json.dumps(result))
    return 0 if result["serves"] == "new" else 1


def _go_back(server: ServedHead, old: Path, head: Path, verdict: str) -> None:
    try:
        server.exchange(old)
    except DeployError as error:
        raise DeployError(
            f"{verdict}: worse, but {head} still serves, since the old head did not load: {error}"
        ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="eagle-plugin deploy",
        description=__doc__,
        epilog=EPILOG,
    )
    parser.add_argument("head", metavar="HEAD", help="folder of the new head, or its name in `models list`")
    parser.add_argument("--server", required=True, metavar="URL", help="a server that was started with EAGLE_DEPLOY")
    named = os.environ.get(FOLDER)
    parser.add_argument(
        "--folder", type=Path, default=None if not named else Path(named), metavar="DIR",
        help="the server's EAGLE_DEPLOY (default: that variable here)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2000, metavar="N", help="of the new head (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="M", help="the longest wait for them (%(default)s)"
    )
    parser.add_argument("--no-watch", action="store_true", help="do not compare, keep the new head")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    options = parser.parse_args(argv)
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds is {options.rounds}, wanted at least {FEWEST_ROUNDS}")
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes is {options.minutes}, wanted a time above 0")
    if options.folder is None:
        raise DeployError(f"the folder of the server is not given; set {FOLDER} as the server has it, or give --folder")
    return options


def _remember(options: argparse.Namespace, server: ServedHead) -> None:
    """Keep the server's counts, which go on through an exchange, as those when its present head came."""
    facts = server.read()
    with contextlib.suppress(CountsError):  # without metrics no head is compared
        counts = served_counts(options.server)
        kept = {"pid": facts.get("pid"), "head": facts["head"], "rounds": counts.rounds, "at_depth": counts.at_depth}
        write_output(options.folder / COUNTS, [json.dumps(kept), "\n"])


def _before(options: argparse.Namespace, server: ServedHead) -> Counts:
    """What the server has verified with its present head; raises DeployError if that is too little to compare with."""
    counts, facts = _counts(options.server), server.read()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # nothing was deployed to this server yet
        kept = json.loads((options.folder / COUNTS).read_text(encoding="utf-8"))
        if (kept["pid"], kept["head"]) == (facts.get("pid"), facts["head"]):
            counts = counts.since(Counts(kept["rounds"], tuple(kept["at_depth"])))
    if counts.rounds < FEWEST_ROUNDS:
        raise DeployError(
            f"the server has verified {counts.rounds:.0f} rounds with its head, wanted at least {FEWEST_ROUNDS} to "
            "compare with: let it serve first, or give --no-watch"
        )
    return counts


class _Restarted(DeployError):
    """Another process serves, or another head."""


def _check_same(server: ServedHead, facts: Mapping[str, Any], head: Path) -> None:
    """A server that was started again has the head of its flags."""
    now = server.read()
    if (now.get("pid"), now["head"]) != (facts.get("pid"), facts["head"]):
        raise _Restarted(
            f"the server was started again, or another command gave it a head: {now['head']} serves, and {head} was "
            "not compared; give the server the head with its flags, or run this again"
        )


def _watch(options: argparse.Namespace, server: ServedHead, before: Counts, head: Path) -> Comparison | None:
    """Wait until the new head has enough rounds, or the time is over; None if it had no round."""
    begin, facts = _counts(options.server), server.read()
    until = time.monotonic() + 60 * options.minutes
    try:
        with progress_bar() as progress:
            while True:
                time.sleep(LOOK_EVERY)
                more = _counts(options.server).since(begin)
                _check_same(server, facts, head)
                progress(f"rounds with the new head, of {options.rounds}", min(more.rounds / options.rounds, 1.0))
                if more.rounds >= options.rounds or time.monotonic() > until:
                    break
    except _Restarted:
        raise
    except (DeployError, KeyboardInterrupt):
        _say(options, f"{head} serves; it was not compared")
        raise
    if not more.rounds:
        _say(options, f"{head} serves; no request came within {options.minutes:g} minutes, so it was not compared")
        return None
    return compare(before, more)


def _counts(url: str) -> Counts:
    try:
        return served_counts(url)
    except CountsError as error:
        raise DeployError(f"{error}; or give --no-watch") from error


def _say(options: argparse.Namespace, line: str) -> None:
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
