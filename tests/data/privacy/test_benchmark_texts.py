"""The generated texts of the privacy benchmark: what docs/data.md promises for them, on a part of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_plugin.learning.data.privacy.scanner import Scanner

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


@pytest.mark.parametrize("split", ["development", "reported"])
def test_tool_results_code_and_json(split: str, scanner: Scanner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import privacy_tools

    private = list(privacy_tools.private_texts(split))[::2]
    hidden = sum(privacy_tools.is_hidden(text, scanner) for text in private)
    assert len(private) > 150 and hidden / len(private) > 0.95
    assert all(privacy_tools.stays_json(text.text, scanner) is not False for text in private)
    harmless = [text for _, text in privacy_tools.harmless_texts(split)][::2]
    assert len(harmless) > 150 and sum(bool(scanner.find(text)) for text in harmless) / len(harmless) < 0.02


def test_a_filter_that_hides_nothing_is_not_measured_as_good(scanner: Scanner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import privacy_tools

    monkeypatch.setattr(privacy_tools, "redact", lambda texts, scanner: (texts, {}))
    private = list(privacy_tools.private_texts("development"))
    assert not any(privacy_tools.is_hidden(text, scanner) for text in private)
