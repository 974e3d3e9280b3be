"""Acceptance of live traffic by domain, from recorded traffic whose records have counts of rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from eagle_plugin.learning.data.traffic.segments import NewAnswers
from eagle_plugin.learning.deploy.counts import Counts
from eagle_plugin.learning.deploy.drift import Finding, judge

OTHER = ""  # the domain of answers that have none


class DomainFinding(NamedTuple):
    """What was found of one domain; expected: None where nothing was measured, and nothing is judged."""

    domain: str
    finding: Finding
    expected: float | None

    @property
    def drifted(self) -> bool:
        """Whether the domain was judged, and has drifted."""
        return self.expected is not None and bool(self.finding.drifted)

    def __str__(self) -> str:
        name = self.domain or "(no domain)"
        rounds, length, drifted = self.finding.rounds, self.finding.accept_length, self.finding.drifted
        found = f"{name}: accept length {length:.2f} over {rounds:,} rounds"
        if self.expected is None:
            return f"{found}, not measured"
        state = "too few rounds" if drifted is None else "it has drifted" if drifted else "no drift"
        return f"{found}, expected {self.expected:.2f}: {state}"


class DomainWatch:
    """Judges the domains of recorded traffic; rounds of a domain that are too few are joined with later ones."""

    def __init__(
        self, answers: NewAnswers, measured: Mapping[str, float], expect: float | None, margin: float, since: float = 0
    ) -> None:
        """Begin with the answers that were not taken yet.

        Args:
            measured: accept length by set of prompts; a domain of the same name is compared with it.
            expect: in place of all measured ones.
            margin: as of `judge`.
            since: of answers that were asked for since then, in seconds since 1970.
        """
        self._answers, self._since = answers, since
        self._measured, self._expect, self._margin = measured, expect, margin
        self._left: dict[str, Counter[int]] = {}

    def judge(self) -> list[DomainFinding]:
        """One finding per domain of the answers since the last call, by name; answers without a domain come last.

        An answer is counted once, in the interval in which it was recorded.

        Raises:
            DataError: the folder has a damaged record.
        """
        rounds = rounds_by_domain(self._answers.take(), self._since)
        for domain, left in self._left.items():
            rounds.setdefault(domain, Counter()).update(left)
        findings = [self._judge(name, rounds[name]) for name in sorted(rounds, key=lambda name: (name == OTHER, name))]
        self._left = {one.domain: rounds[one.domain] for one in findings if one.finding.drifted is None}
        return findings

    def _judge(self, domain: str, rounds: Counter[int]) -> DomainFinding:
        expected = self._measured.get(domain) if self._expect is None else self._expect
        return DomainFinding(domain, judge(Counts.of_rounds(rounds), expected or 1.0, self._margin), expected)


def rounds_by_domain(records: Iterable[Mapping[str, Any]], since: float = 0.0) -> dict[str, Counter[int]]:
    """Domain -> accepted drafts -> rounds, of the answers that were asked for since a moment and have counts."""
    found: dict[str, Counter[int]] = {}
    for record in records:
        if (drafts := _drafts(record)) and record.get("time", 0.0) >= since:
            found.setdefault(str(record.get("domain", OTHER)), Counter()).update(dict(enumerate(drafts)))
    return found


def _drafts(record: Mapping[str, Any]) -> list[int]:
    response = record.get("response")
    found = response.get("accepted_drafts") if isinstance(response, dict) else None
    if not isinstance(found, list) or not all(type(count) is int and count >= 0 for count in found):
        return []
    return found if any(found) else []
