"""The generated texts of the privacy benchmark: what docs/data.md promises for them, on a part of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_plugin.data.privacy.scanner import Scanner

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("split", ["development", "reported"])
def test_most_private_values_are_found_and_few_false_alarms_raised(
    split: str, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from privacy import covers
    from privacy_generated import harmless_texts, private_texts

    private = [text.case for text in private_texts(split)[::3] if "not named" not in text.case.type]
    found = sum(covers(scanner, case) for case in private)
    assert len(private) > 250 and found / len(private) > 0.95
    harmless = [text for _, text in harmless_texts(split)[::3]]
    assert len(harmless) > 200 and sum(bool(scanner.find(text)) for text in harmless) / len(harmless) < 0.02


def test_the_two_splits_share_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from privacy_generated import harmless_texts, private_texts

    development, reported = ({text.case.text for text in private_texts(one)} for one in ("development", "reported"))
    assert len(development & reported) == 0
    assert len(harmless_texts("reported")) > 500
