"""`eagle-plugin optimize`: one recipe, from prompts to a trained head with its measured gain; it can be resumed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.choices import resolve_target
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.common.command_line import Parser, positive_real
from eagle_plugin.learning.jobs.jobs_command import ACTIONS, run_action
from eagle_plugin.learning.jobs.recipe import JobError, read_job
from eagle_plugin.learning.jobs.runner import check_until, run_job
from eagle_plugin.learning.jobs.stage_process import INTERRUPTED, StopRequested
from eagle_plugin.learning.jobs.stages import list_stages
from eagle_plugin.learning.jobs.watch import Watch
from eagle_plugin.models.shipped import recipe_file

EPILOG = """\
examples:
  eagle-plugin optimize smollm2-135m-instruct --out out/head            the recipe that comes with eagle-plugin
  eagle-plugin optimize RECIPE.yaml --out out/head --until features     stop before training
  eagle-plugin optimize RECIPE.yaml --out out/head                      the same command resumes after a kill
  eagle-plugin optimize smollm2-135m-instruct-peagle --data out/head --out out/peagle --minutes 10

The folder --out has everything: prompts.jsonl, generated.jsonl, recorded.jsonl, vocabulary.safetensors, features/,
train/NAME/ for each training run, check.json and eval.json. The trained head is OUT/head. With --data the files of the
first stages, up to features/, are in that folder; another job with the same recipe for them uses them again.

A folder of jobs that can be listed, described from any machine, stopped and resumed:
  eagle-plugin optimize create --help
What a recipe will take, before anything is downloaded or computed:
  eagle-plugin optimize estimate RECIPE.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns 0, raises UserError for anything refused."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ACTIONS:
        return run_action(args)
    parser = Parser(
        prog="eagle-plugin optimize",
        usage="%(prog)s RECIPE --out DIR [options], or %(prog)s " + "|".join(ACTIONS) + " ...",
        description=__doc__,
        epilog=EPILOG,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe, as in the examples"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for everything that the job makes"
    )
    parser.add_argument("--until", metavar="STAGE", help="stop after the stage whose name starts with STAGE")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder for prompts, answers and features (--out)")
    parser.add_argument(
        "--minutes",
        type=partial(positive_real, what="number of minutes"),
        metavar="M",
        help="train for M minutes in all, not for the recipe's budget",
    )
    options = parser.parse_args(args)
    console = Console(stderr=True)
    job = read_job(recipe_file(options.recipe))
    # What is wrong with the recipe is reported before a target is downloaded; no stage looks at the target here.
    check_until(list_stages(job, Path(job.target), options.out, options.data, options.minutes), options.until)
    try:
        target = resolve_target(job.target, console)
        run_job(
            job,
            target,
            options.out,
            console,
            data=options.data,
            minutes=options.minutes,
            until=options.until,
            watch=Watch(console),
        )
    except ServerError as error:
        raise JobError(str(error)) from error
    except StopRequested:
        console.print("stopped; the same command continues", highlight=False)
        return INTERRUPTED
    console.print(f"the trained head is {options.out / 'head'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
