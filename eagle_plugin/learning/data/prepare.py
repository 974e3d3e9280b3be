"""`eagle-plugin data prepare`: converts files of prompts in any known format to one file of prompts in normal form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from eagle_plugin.common.atomic_io import inherit_privacy, write_output
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.devices import usable_cores
from eagle_plugin.common.progress import ProgressBars
from eagle_plugin.learning.data.preparation_stats import PreparationStats, print_stats
from eagle_plugin.learning.data.prepare_options import prepare_parser
from eagle_plugin.learning.data.privacy.filter import (
    FilteredPrompt,
    FilterPrompts,
    PrivacySettings,
    RawPrompt,
    open_filter,
)
from eagle_plugin.learning.data.privacy.phones import parse_regions
from eagle_plugin.learning.data.provenance import (
    UNKNOWN,
    Origin,
    Sources,
    Terms,
    check_terms,
    origin_of,
    write_sources,
)
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.formats import Record, read_records
from eagle_plugin.learning.data.sources.prompts import (
    Prompt,
    assign_id_and_split,
    digest,
    format_prompt,
    has_half_characters,
    normalise,
)
from eagle_plugin.learning.data.sources.record_files import CUT, SkippedRecord
from eagle_plugin.learning.data.target_identity import TargetCheck
from eagle_plugin.models import target_folder

DUPLICATE = "duplicate"
HALVED = "half of a character written as ?"
RECORDING = "capture"  # the format whose answers say which target gave them
OTHER_TARGET = "answered by another target"
ANEW = (
    "use the prompts only, without --keep-responses, and let the target answer with `eagle-plugin data generate`; or "
    "give the target that was served; or leave them out with --skip-other-targets"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = prepare_parser().parse_args(argv)
    console = Console(stderr=True)
    if not 0 <= arguments.val_share < 1:
        raise DataError(f"--val-share is {arguments.val_share}, wanted a share from 0 to below 1")
    out = Path(arguments.out)
    for name in arguments.files:
        if name != "-" and Path(name).resolve() == out.resolve():
            raise DataError(f"--out {out} is one of the files to read; give another name")
    workers = usable_cores() if arguments.workers is None else arguments.workers
    if workers < 1:
        raise DataError(f"--workers is {workers}, wanted 1 or more")
    tokenizer = str(target_folder(arguments.tokenizer)) if arguments.tokenizer else None
    if arguments.target and not arguments.keep_responses:
        raise DataError("--target is for answers, and without --keep-responses none is kept; leave one of the two out")
    if arguments.skip_other_targets and not arguments.target:
        raise DataError("--skip-other-targets needs a target to compare with; give it with --target")
    target = target_folder(arguments.target) if arguments.target else None
    regions = parse_regions(arguments.phone_regions)
    stated = Terms(arguments.license or UNKNOWN, False if arguments.forbids_training else None)
    origins = {}
    for name in arguments.files:
        origin = origin_of(name, stated if stated != Terms() else None, arguments.keep_responses)
        shown = arguments.source or origin.source or name
        terms = check_terms({shown: origin.terms or Terms()}, arguments.allow_licenses, arguments.accept_terms)[shown]
        origins[name] = origin._replace(terms=origin.terms and terms)
    settings = PrivacySettings(arguments.privacy, arguments.recogniser, regions, tokenizer)
    stats = prepare(
        arguments.files,
        out,
        settings,
        workers=workers,
        val_share=arguments.val_share,
        keep_responses=arguments.keep_responses,
        skip_broken=arguments.skip_broken,
        source=arguments.source,
        target=target,
        skip_other_targets=arguments.skip_other_targets,
        origins=origins,
        console=console,
    )
    print_stats(stats, settings, out, console)
    return 0


def prepare(
    files: Sequence[str],
    out: Path,
    settings: PrivacySettings,
    *,
    workers: int = 1,
    val_share: float = 0.02,
    keep_responses: bool = False,
    skip_broken: bool = False,
    source: str | None = None,
    target: Path | None = None,
    skip_other_targets: bool = False,
    origins: Mapping[str, Origin] | None = None,
    console: Console | None = None,
) -> PreparationStats:
    """Write the prompts of all files to `out`, whole or not at all. The same files give the same bytes.

    target: folder of the target that kept answers must be of; skip_other_targets: those of others are left out.
    origins: of files of which something is known.

    Raises:
        DataError: a file cannot be read, the filter cannot be loaded, an answer is of another target, or no prompt is
            left.
    """
    stats = PreparationStats()
    check = TargetCheck(target, ANEW, skip_other_targets) if keep_responses else None
    seen: set[bytes] = set()
    sources: Sources = {}
    read = partial(read_records, skip_broken=skip_broken)

    def lines(filter_prompts: FilterPrompts, advance: Callable[[int], None]) -> Iterator[str]:
        raw = _raw_prompts(files, read, check, source, origins or {}, sources, stats, advance)
        for filtered in filter_prompts(raw):
            for prompt in _count(filtered, seen, stats):
                final = assign_id_and_split(prompt, val_share)
                stats.kept[final.split] += 1
                yield format_prompt(final)
        if not stats.kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in stats.skipped.most_common())
            raise DataError(f"no prompt is left of {stats.read} records: {reasons}; give other files")

    # Workers start before the progress bar: they must not inherit the thread that draws it.
    with (
        open_filter(settings, workers) as filter_prompts,
        _progress(files, console, stats) as advance,
        inherit_privacy(*files),
    ):
        write_output(out, lines(filter_prompts, advance))
        write_sources(out, sources)
    stats.note = check.note() if check else None
    return stats


def _raw_prompts(
    files: Sequence[str],
    read: Callable[[str, Callable[[int], None]], Iterator[Record | SkippedRecord]],
    check: TargetCheck | None,
    source: str | None,
    origins: Mapping[str, Origin],
    sources: Sources,
    stats: PreparationStats,
    advance: Callable[[int], None],
) -> Iterator[RawPrompt]:
    """The records of all files in normal form, without duplicates; check: of the answers, None if none is kept.

    sources: gets the terms of every source of which something is known.
    """
    seen: set[bytes] = set()
    for name in files:
        origin = origins.get(name, Origin(None, None))
        for item in read(name, advance):
            stats.read += not (isinstance(item, SkippedRecord) and item.reason == CUT)
            if isinstance(item, SkippedRecord):
                stats.skip(item.where, item.reason)
                continue
            record = replace(item, source=source or origin.source or item.source)
            try:
                raw = _raw_prompt(record, check is not None)
            except Unusable as reason:
                stats.skip(record.where, str(reason))
                continue
            if check and item.answer and item.source == RECORDING and not check.add(item.target, item.where):
                stats.skip(record.where, OTHER_TARGET)
                continue
            # Before the filter, which is slow; and again after it (`_count`): redaction can make prompts equal.
            if (key := digest(raw.prompt)) in seen:
                stats.skip(record.where, DUPLICATE)
            else:
                seen.add(key)
                if origin.terms is not None:
                    known = sources.setdefault(record.source, origin.terms)
                    sources[record.source] = known if known == origin.terms else known.joined(origin.terms)
                halved = (HALVED,) if has_half_characters(raw.exact or raw.prompt) else ()
                for what in (*record.changes, *halved):
                    stats.change(record.where, what)
                yield raw


def _raw_prompt(record: Record, keep_responses: bool) -> RawPrompt:
    prompt = normalise(record, keep_responses)
    ids = record.answer.token_ids if record.answer else None
    if not (keep_responses and record.prompt_ids and ids and record.answer):
        return RawPrompt(record.where, prompt)
    # The exact ids that were served; the same text, encoded again, can give other ids.
    response = {"token_ids": ids, "finish": record.answer.finish or "recorded"}
    exact = Prompt("", record.source, prompt_ids=record.prompt_ids, response=response, target=record.target)
    return RawPrompt(record.where, prompt, exact)


def _count(filtered: FilteredPrompt, seen: set[bytes], stats: PreparationStats) -> Iterator[Prompt]:
    """Count a result of the filter; yields its prompt unless it was left out or is a duplicate."""
    stats.found.update(filtered.found)
    stats.private += bool(filtered.found)
    if filtered.prompt is None:
        stats.skip(filtered.where, filtered.reason)
    elif (key := digest(filtered.prompt)) in seen:
        stats.skip(filtered.where, DUPLICATE)
    else:
        seen.add(key)
        yield filtered.prompt


@contextmanager
def _progress(
    files: Sequence[str], console: Console | None, stats: PreparationStats
) -> Iterator[Callable[[int], None]]:
    """A progress bar over the bytes of all files; without a total if one is stdin."""
    sizes = [Path(name).stat().st_size for name in files if Path(name).is_file()]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rows]:,} prompts"))
    bars = ProgressBars(*columns, TimeRemainingColumn(), console=console or Console(), shown=console is not None)
    with bars as bar:
        task = bar.add_task("preparing", total=sum(sizes) if len(sizes) == len(files) else None, rows=0)
        yield lambda count: bar.update(task, advance=count, rows=stats.kept.total())


if __name__ == "__main__":
    raise SystemExit(end_of(main, owns_process=True))
