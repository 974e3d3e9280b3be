"""What share of each row is trained on, checked before anything is: a mask of ones would go unnoticed in the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from eagle_plugin.data.rows import DataError, TokenRow

BINS = 10
MEAN_SHARES = (0.05, 0.95)
SAMPLE_TOKENS = 120  # shown of a prompt's end and of a response's beginning


@dataclass
class MaskReport:
    """Shares of response tokens over a set of rows."""

    rows: int = 0
    share_sum: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)  # rows by tenths of their share

    @property
    def mean(self) -> float:
        """The mean over rows of the share of response tokens."""
        return self.share_sum / self.rows if self.rows else 0.0

    def add(self, row: TokenRow, *, allow: bool = False) -> None:
        """Count a row; raises DataError if all or none of it is response, unless allowed."""
        trained, length = len(row.response_ids), len(row.prompt_ids) + len(row.response_ids)
        share = trained / length if length else 0.0
        if share in (0.0, 1.0) and not allow:
            raise DataError(
                f"row {row.id} trains on {trained} of its {length} tokens, wanted some and not all of them: "
                "the prompt was taken for a response or is missing; render or generate the row again"
            )
        self.rows += 1
        self.share_sum += share
        self.histogram[min(int(share * BINS), BINS - 1)] += 1

    def judge(self, *, allow: bool = False) -> None:
        """Raise DataError if the mean over all rows cannot be right, unless allowed."""
        low, high = MEAN_SHARES
        if self.rows and not low <= self.mean <= high and not allow:
            raise DataError(
                f"{self.mean:.1%} of the tokens of a row are trained on ({self.describe()}), wanted {low:.0%} to "
                f"{high:.0%}: look at a row, and allow it with --allow-odd-masks if that is how the data is"
            )

    def describe(self) -> str:
        """One line: the mean, and the rows by tenths."""
        return f"mean {self.mean:.1%} of a row; rows by tenths: {' '.join(map(str, self.histogram))}"


def check_masks(rows: Iterable[TokenRow], *, allow: bool = False) -> MaskReport:
    """Measure how much of each row is trained on, and refuse what cannot be right.

    Args:
        allow: report only.

    Raises:
        DataError: a row consists of response tokens alone or has none, or the mean share is outside 5 to 95 %.
    """
    report = MaskReport()
    for row in rows:
        report.add(row, allow=allow)
    report.judge(allow=allow)
    return report


def show_masks(row: TokenRow, tokenizer: Any) -> Text:
    """The end of the prompt in grey and the beginning of the response, which is trained on, in green."""
    text = Text(f"{row.id}: ")
    text.append(tokenizer.decode(row.prompt_ids[-SAMPLE_TOKENS:]), style="bright_black")
    text.append(tokenizer.decode(row.response_ids[:SAMPLE_TOKENS]), style="green")
    return text
