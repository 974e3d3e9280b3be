"""Functions of rounds, captured by the graph emulator for the batch sizes that memory allows, and replayed or not."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.captured_rounds import CapturedRounds, FunctionKey
from eagle_plugin.runtime.capturing import capturer_for, left_out_without_memory
from eagle_plugin.runtime.round import Drafts, HeadState, TopM
from eagle_plugin.runtime.round_memory import OneRequest, RoundMemory

SHAPE = Shape(2, 2, 4)
LIKE = OneRequest(
    logits=torch.zeros(1, 6),
    features=torch.zeros(1, 3),
    state=HeadState(TopM(torch.zeros(1, 5), torch.zeros(1, 5, dtype=torch.int64)), torch.zeros(1, 3)),
    drafts=Drafts.plain(torch.zeros(1, dtype=torch.int64), SHAPE.width),
)
LOGGER = logging.getLogger("test")
AROUND = partial(
    left_out_without_memory, in_any_rank=bool, logger=LOGGER, memory_flag="--memory", batch_flag="--most-requests"
)


class Doubled(CapturedRounds[RoundMemory]):
    """Its one function doubles the roots of a round."""

    def __init__(self, fits: int = 8, graphs_fit: int = 8) -> None:
        """fits: requests that the memory has room for; graphs_fit: those that the graphs have room for beside it."""
        super().__init__()
        self._fits, self._graphs_fit = fits, graphs_fit
        with capturer_for(self, "cpu", LOGGER) as self.capturer:
            self._capture_sizes([1, 2, 4, 8], AROUND, self._allocate, self._capture_size)

    def _allocate(self, most: int) -> RoundMemory:
        if most > self._fits:
            raise torch.OutOfMemoryError("no memory")
        return RoundMemory(SHAPE, most, LIKE)

    def _capture_size(self, padded_b: int) -> None:
        key: FunctionKey = "double", padded_b, SHAPE, None
        self.functions.capture(self.capturer, key, lambda: self._memory.view("roots", padded_b) * 2)
        if padded_b > self._graphs_fit:
            raise torch.OutOfMemoryError("no memory")

    def run(self, roots: Tensor) -> Tensor:
        """The doubled roots, [b] int64, of a round of these."""
        b = len(roots)
        padded_b = self._buckets.of(b) or b
        key: FunctionKey = "double", padded_b, SHAPE, None
        if self._is_captured(key):
            self._memory.put_padded("roots", roots, padded_b, 7)
        found: Tensor = self._run(key, lambda: roots * 2)
        assert found[b:].tolist() == [14] * (padded_b - b)
        return found[:b]


@pytest.mark.parametrize(
    ("rounds", "sizes", "replays"),
    [
        (Doubled(), [8, 4, 2, 1], 8),
        (Doubled(fits=4), [4, 2, 1], 4),  # memory of the largest size that fits
        (Doubled(fits=0), [], 0),
        (Doubled(graphs_fit=4), [4, 2, 1], 4),  # what was captured of a size that is left out is not replayed
    ],
    ids=["all", "no memory for 8", "no memory", "no memory for the graphs of 8"],
)
def test_batches_are_padded_to_the_sizes_that_memory_allows(rounds: Doubled, sizes: list[int], replays: int) -> None:
    assert rounds.sizes() == sizes
    for b in range(1, 11):
        roots = torch.arange(b) + 100
        assert rounds.run(roots).tolist() == (roots * 2).tolist()
    assert rounds.functions.replays == replays


def test_the_fix_that_the_log_names(caplog: pytest.LogCaptureFixture) -> None:
    Doubled(graphs_fit=4)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "graphs of 8 requests" in record.getMessage()
    assert "a smaller --memory, or --most-requests 4" in record.getMessage()
