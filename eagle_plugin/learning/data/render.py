"""`eagle-plugin data render`: turns recorded answers into token rows; the target is not asked."""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from eagle_plugin.common.atomic_io import inherit_privacy, write_output
from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.data.generation.chat import ChatRenderer, RenderedTurn, UntrainableTurn
from eagle_plugin.learning.data.masks import MaskReport, show_masks
from eagle_plugin.learning.data.provenance import read_sources, write_sources
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row, turn_id
from eagle_plugin.learning.data.sources.prompts import CUT, Prompt, read_prompts
from eagle_plugin.learning.data.target_files import load_tokenizer, stop_token_ids
from eagle_plugin.learning.data.target_identity import TargetCheck
from eagle_plugin.models import target_folder

EXAMPLES = """\
examples:
  eagle-plugin data prepare traffic.jsonl --keep-responses --out prompts.jsonl
  eagle-plugin data render prompts.jsonl --target TARGET --out rows.jsonl

A head learns best from answers that its target generates (`eagle-plugin data generate`). Render recorded answers only
if the target itself wrote them, or if the target cannot be asked again. An answer of a capture says which target gave
it; that of another target is refused.
"""
ANEW = (
    "let the target answer with `eagle-plugin data generate`, which uses the prompts only; give the target that was "
    "served; or use the answers of all targets with --any-target"
)


def render_prompt(
    prompt: Prompt, renderer: ChatRenderer, date: datetime.date | None = None
) -> Iterator[TokenRow | UntrainableTurn]:
    """Yield a row, or the reason why there is none, per recorded answer of the prompt.

    Of a capture that says which target answered, the last turn only: the client sent the others, which may be of
    another target, or were recorded with the request that they answered.

    An answer that was cut, by its token limit or perhaps by a stop string, has no stop token in its row.

    date: what a template that writes the date gets in place of today; without it, the day of the record, if it says it.
    """
    chat, answer = prompt.messages, prompt.response or {}
    last = sum(message["role"] == "assistant" for message in chat or ()) - 1 if chat else 0
    limited = CUT in (prompt.finish, answer.get("finish"))
    # With stop strings nobody knows whether one of them ended the answer, or a stop token.
    cut = limited or bool(chat and prompt.sampling.get("stop") and not chat[-1].get("tool_calls"))
    given, effort = prompt.sampling.get("chat_template_kwargs"), prompt.sampling.get("reasoning_effort")
    variables = _effort_variables(effort)
    day = date or _day_of(prompt)
    variables |= {} if day is None else {"strftime_now": day.strftime}
    variables |= given if isinstance(given, dict) else {}
    turns = renderer.render_turns(chat, prompt.tools, variables, cut) if chat else _render_raw(prompt, renderer)
    for turn in turns:
        if prompt.target and turn.turn < last:
            yield UntrainableTurn(turn.turn, "earlier turn, sent by the client")
        elif isinstance(turn, RenderedTurn):
            yield TokenRow(
                id=turn_id(prompt.id, turn.turn),
                source=prompt.source,
                split=prompt.split,
                prompt_ids=turn.prompt_ids,
                response_ids=turn.response_ids,
                finish=CUT if limited and turn.turn == last else "recorded",
            )
        else:
            yield turn


def _effort_variables(effort: Any) -> dict[str, Any]:
    """What the engines give to the chat template for `reasoning_effort`, unless the request says it itself.

    `thinking`, which other templates read for the same, is set by SGLang alone: a record does not say its engine.
    """
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _day_of(prompt: Prompt) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(prompt.date or "")
    except ValueError:
        return None


def _render_raw(prompt: Prompt, renderer: ChatRenderer) -> Iterator[RenderedTurn | UntrainableTurn]:
    answer = prompt.response or {}
    if not answer:
        return
    prompt_ids = prompt.prompt_ids or renderer.encode(prompt.prompt or "", special=True)
    yield renderer.join(0, prompt_ids, answer.get("token_ids") or renderer.encode(answer["text"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(
        prog="eagle-plugin data render",
        description="Turn the recorded answers of prepared prompts into token rows, one per assistant turn.",
        epilog=EXAMPLES,
    )
    parser.add_argument("prompts", type=Path, help="JSON lines of `eagle-plugin data prepare --keep-responses`")
    parser.add_argument(
        "--target", required=True, help="folder of the target, or a name of `models list`: for tokenizer and template"
    )
    parser.add_argument("--out", type=Path, required=True, help="file of rows, written whole or not at all")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens per row (default: %(default)s)")
    parser.add_argument(
        "--date",
        type=_date,
        metavar="YYYY-MM-DD",
        help="the day that a chat template writes (default: of each record, or today if it does not say one)",
    )
    parser.add_argument("--any-target", action="store_true", help="use answers of other targets than this one too")
    parser.add_argument(
        "--allow-odd-masks", action="store_true", help="accept rows that are nearly all response, or have none"
    )
    options = parser.parse_args(argv)
    if options.max_length < 2:
        parser.error(f"--max-length is {options.max_length}, wanted at least 2")
    return options


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day, wanted YYYY-MM-DD, such as 2026-03-31") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Render the recorded answers; show one row in colour and a table of the counts."""
    options = parse(argv)
    with inherit_privacy(options.prompts):
        return _render(options)


def _render(options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    target = target_folder(options.target)
    tokenizer = load_tokenizer(target)
    renderer = ChatRenderer(tokenizer, stop_token_ids(target), options.max_length)
    report, counts, skipped = MaskReport(), Counter[str](), Counter[str]()
    first: dict[str, str] = {}  # the turn in which a reason was found first
    check = TargetCheck(None if options.any_target else target, ANEW)

    def lines() -> Iterator[str]:
        total = sum(1 for prompt in read_prompts(options.prompts))
        for prompt in track(read_prompts(options.prompts), "rendering", total=total, console=console):
            counts["prompts"] += 1
            results = list(render_prompt(prompt, renderer, options.date))
            counts["undated"] += options.date is None and bool(prompt.messages) and _day_of(prompt) is None
            for result in results or [UntrainableTurn(0, "no recorded answer")]:
                if isinstance(result, UntrainableTurn):
                    skipped[result.reason] += 1
                    first.setdefault(result.reason, turn_id(prompt.id, result.turn))
                    continue
                check.add(prompt.target, f"{options.prompts}: {prompt.id}")
                if not report.rows:
                    console.print(show_masks(result, tokenizer))
                report.add(result, allow=options.allow_odd_masks)
                counts["stopped"] += result.response_ids[-1] in renderer.stop_ids
                yield format_row(result)
        if not report.rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (+skipped).most_common()) or "no prompt"
            raise DataError(
                f"{options.prompts} gives no row: {reasons}; prepare it with --keep-responses, or let the target "
                "answer with `eagle-plugin data generate`"
            )
        report.check_mean(allow=options.allow_odd_masks)

    write_output(options.out, lines())
    write_sources(options.out, read_sources(options.prompts))
    for note in (check.note(), *_notes(renderer, target, counts["undated"])):
        if note:
            console.print(f"warning: {note}", style="yellow", markup=False, soft_wrap=True)
    table = Table("what", "count", "", title=str(options.out), title_justify="left")
    table.add_row("prompts", f"{counts['prompts']:,}", "")
    table.add_row("rows", f"{report.rows:,}", report.describe(), style="bold")
    table.add_row(
        "rows without a stop token",
        f"{report.rows - counts['stopped']:,}",
        "cut, or recorded without one",
    )
    for reason, count in (+skipped).most_common():
        table.add_row(f"no row: {reason}", f"{count:,}", f"first: {escape(first[reason])}", style="yellow")
    Console().print(table)
    return 0


def _notes(renderer: ChatRenderer, target: Path, undated: int) -> Iterator[str]:
    if renderer.end_of_turn:
        yield (
            f"the chat template ends an answer with {renderer.end_of_turn}, which is no eos_token_id in "
            f"generation_config.json or config.json of {target}; it is learned as the end of an answer"
        )
    if renderer.writes_date and undated:
        yield (
            f"the chat template writes the date, and {undated:,} prompts do not say when they were answered: their "
            "rows have today's; give the day with --date"
        )
