"""Under which terms data may be used: the licence of each source, from its prompts to the head that learnt from it.

Beside a file of chats, prompts or rows, `FILE.source.json` has them by source; a feature store has `source.json`. Rows
and documents name their source themselves. What nothing is known of is `UNKNOWN`.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.json_files import first_fault, kept_object, read_object
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.models.store import MANIFEST as MODEL_MANIFEST

UNKNOWN = "unknown"
STORE_FILE = "source.json"
BOTH = " AND "  # between licences that hold together, as in SPDX expressions
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
READ = 1000  # characters of a licence's text in which its name is


@dataclass(frozen=True)
class Terms:
    """What is known of a source."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    license: str = UNKNOWN
    trains_models: bool | None = None  # False: its terms forbid to train other models on it; None: not known
    answers_only: bool = False  # `trains_models` is about its recorded answers and not about its prompts
    accepted: bool = False  # the user may train on it nevertheless, by their own word

    def of_prompts(self) -> Terms:
        """The terms where recorded answers are left out."""
        return replace(self, trains_models=None, answers_only=False) if self.answers_only else self

    def joined(self, other: Terms) -> Terms:
        """The terms of what is of both."""
        licenses = sorted({*self.license.split(BOTH), *other.license.split(BOTH)})
        ways = {self.trains_models, other.trains_models}
        forbidden = [one for one in (self, other) if one.trains_models is False]
        return Terms(
            license=BOTH.join(licenses),
            trains_models=False if False in ways else None if None in ways else True,
            answers_only=self.answers_only and other.answers_only,
            accepted=bool(forbidden) and all(one.accepted for one in forbidden),
        )


Sources = dict[str, Terms]
_SOURCES = TypeAdapter(Sources)


def source_file(out: Path) -> Path:
    """Where the sources of a file are, and of a data set its origin and its digest."""
    return out.with_name(f"{out.name}.source.json")


def read_sources(path: Path) -> Sources:
    """The sources of a file of chats, prompts or rows; empty if nothing says them.

    Raises:
        DataError: what is beside it says something else.
    """
    beside = source_file(path)
    fix = "make the file again, or remove it: the licences are then unknown"
    try:
        return parse_sources(read_object(beside, DataError, fix), str(beside))
    except FileNotFoundError:
        return {}


def parse_sources(record: Mapping[str, Any], where: str) -> Sources:
    """The sources of a record that was read from `where`."""
    try:
        return _SOURCES.validate_python(record.get("sources") or {})
    except ValidationError as error:
        raise DataError(
            f"{where} has sources.{first_fault(error)}; correct it, or remove the file: the licences are then unknown"
        ) from None


def write_sources(path: Path, sources: Sources, **others: Any) -> None:
    """Write the sources of a file, and `others` of a data set, beside it; where there are none, nothing stays there."""
    if not sources:
        source_file(path).unlink(missing_ok=True)
        return
    write_output(source_file(path), [format_sources(sources, **others)])


def format_sources(sources: Sources, **others: Any) -> str:
    """The record of sources as JSON."""
    return json.dumps(others | {"sources": {name: asdict(terms) for name, terms in sources.items()}}, indent=1) + "\n"


def carry_sources(prompts: Path, rows: Path) -> None:
    """Give a file of rows the sources of the prompts to which the target's answers are added."""
    write_sources(rows, join_sources(read_sources(rows), of_prompts(read_sources(prompts))))


def of_prompts(sources: Sources) -> Sources:
    """The sources where recorded answers are left out."""
    return {name: terms.of_prompts() for name, terms in sources.items()}


def join_sources(*parts: Sources) -> Sources:
    """All sources; of one that is in several parts, what holds for all of it."""
    found: Sources = {}
    for name, terms in (pair for part in parts for pair in part.items()):
        found[name] = found[name].joined(terms) if name in found else terms
    return found


class Origin(NamedTuple):
    """What is known of a file of chats, whose records do not name their source: its only source, and the terms."""

    source: str | None
    terms: Terms | None


def origin_of(name: str, stated: Terms | None, answers: bool) -> Origin:
    """What is known of a file, or of "-"; stated: where nothing is beside it. answers: whether these are used too."""
    found = {} if name == "-" else read_sources(Path(name))
    terms = functools.reduce(Terms.joined, found.values()) if found else stated
    if terms is not None and not answers:
        terms = terms.of_prompts()
    return Origin(next(iter(found)) if len(found) == 1 else None, terms)


def add_terms_options(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-licenses` and `--accept-terms`."""
    parser.add_argument(
        "--allow-licenses", nargs="+", default=[], metavar="ID", help="refuse sources with another licence than these"
    )
    parser.add_argument(
        "--accept-terms",
        nargs="+",
        default=[],
        metavar="NAME",
        help="you may train on these sources, although their terms forbid to train other models",
    )


def check_terms(sources: Sources, allowed: Collection[str], accepted: Collection[str]) -> Sources:
    """The sources, with a note of those whose terms the user has accepted.

    Raises:
        DataError: one has another licence than `allowed` (if that is not empty), or its terms forbid to train models.
    """
    known = {name.casefold() for name in allowed}
    checked: Sources = {}
    for name, terms in sources.items():
        own = terms.license.casefold()
        if known and own not in known and not set(own.split(BOTH.casefold())) <= known:
            raise DataError(
                f"the source {name} has the licence {terms.license}, wanted one of {', '.join(allowed)}; leave the "
                "source out, or allow its licence with --allow-licenses"
            )
        if terms.trains_models is False and name in accepted:
            terms = replace(terms, accepted=True)
        if terms.trains_models is False and not terms.accepted:
            raise DataError(
                f"the terms of the source {name} forbid to train other models on it; leave it out, or say that you may "
                f"with --accept-terms {name}"
            )
        checked[name] = terms
    return checked


def license_of(folder: Path) -> str:
    """The licence of a model or data set in a folder: of its card, its licence's text, or our catalogue; or UNKNOWN."""
    found = kept_object(folder / MODEL_MANIFEST).get("license") or _card_license(folder / "README.md")
    return str(found or _text_license(folder))


def _card_license(card: Path) -> str | None:
    """`license` in the front matter of a card."""
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
        values = yaml.safe_load(text.split("\n---", 1)[0]) if text.startswith("---\n") else None
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return license_in(values) if isinstance(values, dict) else None


def license_in(card: Mapping[str, Any]) -> str | None:
    """The licence that the front matter of a card names; `UNKNOWN` for what is neither a text nor a list of texts."""
    found = card.get("license")
    if found == "other":
        found = card.get("license_name") or found
    names: list[Any] = found if isinstance(found, list) else [found]
    if names in ([], [None]):
        return None
    # Nothing else is written as a text: YAML's aliases let a card of a few lines stand for gigabytes.
    return BOTH.join(names) if all(isinstance(name, str) for name in names) else UNKNOWN


def _text_license(folder: Path) -> str:
    for name in LICENSE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")[:READ]
        except OSError:
            continue
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if "apache license" in text.casefold() and "version 2.0" in text.casefold():
            return "apache-2.0"
        if lines:
            return "mit" if lines[0].casefold() == "mit license" else lines[0][:80]
    return UNKNOWN


def count_sources(rows: Iterable[tuple[str, int, int]], sources: Sources) -> dict[str, dict[str, Any]]:
    """Documents, tokens and response tokens by source, with its terms; rows: (source, tokens, response tokens)."""
    found: dict[str, dict[str, Any]] = {}
    for source, tokens, responses in rows:
        if source not in found:
            terms = asdict(sources.get(source, Terms()))
            del terms["answers_only"]
            found[source] = {"documents": 0, "tokens": 0, "response_tokens": 0, **terms}
        found[source]["documents"] += 1
        found[source]["tokens"] += tokens
        found[source]["response_tokens"] += responses
    return dict(sorted(found.items()))
