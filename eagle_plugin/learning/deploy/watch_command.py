"""`eagle-plugin watch`: is the acceptance of live traffic still that of the head's benchmark?"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.data.traffic.segments import NewAnswers, check_folder
from eagle_plugin.learning.deploy.counts import Counts, CountsError, served_counts
from eagle_plugin.learning.deploy.domains import DomainWatch
from eagle_plugin.learning.deploy.drift import LEAST_ROUNDS, WatchError, expected_by_domain, judge
from eagle_plugin.models import head_folder

OK, DRIFT, TOO_FEW = 0, 1, 3
MOST_FAILED = 10  # looks at the metrics, in a row
NO_DOMAINS = (
    "no record has counts of rounds: wait for traffic; vLLM counts them with --per-request-spec-decode-metrics summary"
)
EPILOG = """\
examples:
  eagle-plugin watch http://127.0.0.1:30000 --head out/package --once
  eagle-plugin watch http://127.0.0.1:30000 --head out/package --every 60 --start-job JOB.yaml
  eagle-plugin watch http://127.0.0.1:30000 --expect 2.4 --once
  eagle-plugin watch http://127.0.0.1:30000 --head out/package --captures /data/capture --every 60

--once judges all rounds since the server was started. --every judges the rounds of each interval, and goes on until
the acceptance has drifted; an interval with fewer than 2,000 rounds is joined with the next. A server that does not
answer is asked again, up to 10 times in a row.

--captures also judges each domain that clients named with the header X-Eagle-Domain (docs/capture.md). A domain is
compared with the set of prompts of the same name in the benchmark of the head.

exit codes: 0 no drift, 1 drift (with --start-job that of the job), 2 refused, 3 fewer than 2,000 rounds (--once)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Watch a server; returns an exit code of EPILOG, raises UserError for anything refused."""
    options = _parse(argv)
    measured = expected_by_domain(head_folder(options.head)) if options.expect is None else {}
    expected = _expected(options, measured)
    watch = _domain_watch(options, measured)
    before = Counts(0.0, ()) if options.once else served_counts(options.url, plain=True)
    failed = 0
    while True:
        if not options.once:
            time.sleep(60.0 * options.every)
        try:
            now, failed = served_counts(options.url, plain=True), 0
        except CountsError as error:  # such as a server that is being started again
            failed += 1
            if options.once or failed == MOST_FAILED:
                raise
            print(f"{error}; {failed} of at most {MOST_FAILED} times in a row", flush=True)
            continue
        finding = judge(now.since(before), expected, options.margin)
        domains = watch.judge() if watch else []
        for one in domains:
            print(one, flush=True)
        if watch and not domains:
            print(NO_DOMAINS, flush=True)
        if finding.drifted is None and not any(one.drifted for one in domains):
            print(f"{finding.rounds:,} rounds, wanted at least {LEAST_ROUNDS:,}: wait for more traffic", flush=True)
            if options.once:
                return TOO_FEW
            continue
        found = f"accept length {finding.accept_length:.2f} over {finding.rounds:,} rounds, expected {expected:.2f}"
        if drifted := [one.domain or "answers without a domain" for one in domains if one.drifted]:
            found = f"{found}; by domain, {', '.join(drifted)}"
        if finding.drifted or drifted:
            print(f"{found}: it has drifted; {_advice(options)}", flush=True)
            return DRIFT if options.start_job is None else _start(options.start_job)
        print(f"{found}: no drift", flush=True)
        if options.once:
            return OK
        before = now


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="eagle-plugin watch",
        description=__doc__,
        epilog=EPILOG,
    )
    parser.add_argument("url", metavar="URL", help="a server with the plugin; SGLang needs --enable-metrics")
    parser.add_argument("--head", metavar="HEAD", help="a package, or the head in the folder of its job")
    parser.add_argument("--domain", metavar="SET", help="expect what was measured of this set of prompts (mean of all)")
    parser.add_argument("--captures", metavar="FOLDER", help="judge domains too, from the records of EAGLE_CAPTURE")
    parser.add_argument("--hours", type=float, metavar="H", help="with --once: of the records, the last H hours (all)")
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
    if options.hours is not None and not (options.once and options.captures and 0 < options.hours < math.inf):
        parser.error(f"--hours is {options.hours}, wanted hours above 0, with --once and --captures")
    if options.every is not None and not 0 < options.every < math.inf:
        parser.error(f"--every is {options.every}, wanted minutes above 0")
    if options.start_job is not None and not options.start_job.is_file():
        raise WatchError(f"--start-job {options.start_job} is no file; give the YAML of a job")
    return options


def _expected(options: argparse.Namespace, by_domain: Mapping[str, float]) -> float:
    if options.expect is not None:
        return float(options.expect)
    if options.domain is None:
        return fmean(by_domain.values())
    if options.domain not in by_domain:
        raise WatchError(f"--domain {options.domain} was not measured, wanted one of {', '.join(by_domain)}")
    return by_domain[options.domain]


def _domain_watch(options: argparse.Namespace, measured: Mapping[str, float]) -> DomainWatch | None:
    if options.captures is None:
        return None
    answers = NewAnswers(check_folder(options.captures))
    if options.every is not None:
        answers.skip()
    since = 0.0 if options.hours is None else time.time() - 3600.0 * options.hours
    return DomainWatch(answers, measured, options.expect, options.margin, since)


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
