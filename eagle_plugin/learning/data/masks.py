"""Checks which share of each row is trained on. The loss would not show a mask that is 1 everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from eagle_plugin.learning.data.rows import DataError, TokenRow

BINS = 10
MEAN_SHARES = (0.05, 0.95)
SAMPLE_TOKENS = 120  # that `show_masks` shows, of the prompt's end and of the response's beginning


@dataclass
class MaskReport:
    """The share of response tokens in each row, over a set of rows."""

    rows: int = 0
    share_sum: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)  # number of rows per tenth of their share

    @property
    def mean(self) -> float:
        """The mean share of response tokens, over rows."""
        return self.share_sum / self.rows if self.rows else 0.0

    def add(self, row: TokenRow, *, allow: bool = False) -> None:
        """Count a row; raises DataError if all or none of its tokens are response tokens, unless allowed."""
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

    def check_mean(self, *, allow: bool = False) -> None:
        """Raise DataError if the mean share is below 5 % or above 95 %, unless allowed."""
        low, high = MEAN_SHARES
        if self.rows and not low <= self.mean <= high and not allow:
            raise DataError(
                f"{self.mean:.1%} of the tokens of a row are trained on ({self.describe()}), wanted {low:.0%} to "
                f"{high:.0%}: look at a row, and allow it with --allow-odd-masks if that is how the data is"
            )

    def describe(self) -> str:
        """One line: the mean, and the number of rows per tenth."""
        return f"mean {self.mean:.1%} of a row; rows by tenths: {' '.join(map(str, self.histogram))}"


def show_masks(row: TokenRow, tokenizer: Any) -> Text:
    """The end of the prompt in grey and the beginning of the response, which is trained on, in green."""
    text = Text(f"{row.id}: ")
    text.append(tokenizer.decode(row.prompt_ids[-SAMPLE_TOKENS:]), style="bright_black")
    text.append(tokenizer.decode(row.response_ids[:SAMPLE_TOKENS]), style="green")
    return text
