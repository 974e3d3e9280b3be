"""`eagle-plugin watch`: is the acceptance of live traffic still that of the head's benchmark?"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

import httpx

from eagle_plugin.deploy.drift import LEAST_ROUNDS, Counts, WatchError, counts_of, expected_by_domain, judge
from eagle_plugin.models import head_folder

OK, DRIFT, TOO_FEW = 0, 1, 3
EPILOG = """\
examples:
  eagle-plugin watch http://127.0.0.1:30000 --head out/package --once
  eagle-plugin watch http://127.0.0.1:30000 --head out/package --every 60 --start-job JOB.yaml
  eagle-plugin watch http://127.0.0.1:30000 --expect 2.4 --once

--once judges all rounds since the server was started. --every judges the rounds of each interval, and goes on until
the acceptance has drifted; an interval with fewer than 2,000 rounds is joined with the next.

exit codes: 0 no drift, 1 drift (with --start-job that of the job), 2 refused, 3 fewer than 2,000 rounds (--once)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Watch a server; returns an exit code of EPILOG, raises UserError for anything refused."""
    options = _parse(argv)
    expected = _expected(options)
    before = Counts(0.0, ()) if options.once else _ask(options.url)
    while True:
        if not options.once:
            time.sleep(60.0 * options.every)
        now = _ask(options.url)
        finding = judge(now.since(before), expected, options.margin)
        if finding.drifted is None:
            print(f"{finding.rounds:,} rounds, wanted at least {LEAST_ROUNDS:,}: wait for more traffic", flush=True)
            if options.once:
                return TOO_FEW
            continue
        found = f"accept length {finding.accept_length:.2f} over {finding.rounds:,} rounds, expected {expected:.2f}"
        if finding.drifted:
            print(f"{found}: it has drifted; {_advice(options)}", flush=True)
            return DRIFT if options.start_job is None else _start(options.start_job)
        print(f"{found}: no drift", flush=True)
        if options.once:
            return OK
        before = now


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eagle-plugin watch",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="a server with the plugin; SGLang needs --enable-metrics")
    parser.add_argument("--head", metavar="HEAD", help="a package, or the head in the folder of its job")
    parser.add_argument("--domain", metavar="SET", help="expect what was measured of this set of prompts (mean of all)")
    parser.add_argument("--expect", type=float, metavar="L", help="expect this accept length, in place of --head")
    parser.add_argument("--margin", type=float, default=0.05, metavar="M", help="part that it may fall (%(default)s)")
    when = parser.add_mutually_exclusive_group(required=True)
    when.add_argument("--once", action="store_true", help="judge the rounds since the server's start, and end")
    when.add_argument("--every", type=float, metavar="MINUTES", help="judge the rounds of every interval")
    parser.add_argument("--start-job", type=Path, metavar="JOB.yaml", help="after a drift, start this job")
    options = parser.parse_args(argv)
    if (options.head is None) == (options.expect is None):
        parser.error("give either --head or --expect")
    if options.expect is not None and not 1 <= options.expect < math.inf:
        parser.error(f"--expect is {options.expect}, wanted an accept length of at least 1")
    if not 0 <= options.margin < 1:
        parser.error(f"--margin is {options.margin}, wanted a part from 0 to below 1")
    if options.every is not None and not 0 < options.every < math.inf:
        parser.error(f"--every is {options.every}, wanted minutes above 0")
    if options.start_job is not None and not options.start_job.is_file():
        raise WatchError(f"--start-job {options.start_job} is no file; give the YAML of a job")
    return options


def _expected(options: argparse.Namespace) -> float:
    if options.expect is not None:
        return float(options.expect)
    by_domain = expected_by_domain(head_folder(options.head))
    if options.domain is None:
        return fmean(by_domain.values())
    if options.domain not in by_domain:
        raise WatchError(f"--domain {options.domain} was not measured, wanted one of {', '.join(by_domain)}")
    return by_domain[options.domain]


def _ask(url: str) -> Counts:
    address = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    try:
        answer = httpx.get(address, timeout=15.0, trust_env=False, follow_redirects=True).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise WatchError(f"{address} does not answer with metrics ({error}); check address and port") from error
    return counts_of(answer.text)


def _advice(options: argparse.Namespace) -> str:
    if options.start_job is not None:
        return f"starting the job {options.start_job}"
    return (
        "record traffic (docs/capture.md) and train the head further: "
        "eagle-plugin optimize create NAME --workflow base-own"
    )


def _start(recipe: Path) -> int:
    name = datetime.now(timezone.utc).strftime("drift-%Y%m%d-%H%M%S")
    command = [sys.executable, "-m", "eagle_plugin.cli", "optimize", "create", name, "--recipe", str(recipe)]
    return subprocess.run(command).returncode
