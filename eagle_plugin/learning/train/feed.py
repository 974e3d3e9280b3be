"""The batches of the updates after a position in the run, read in advance while the head computes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from eagle_plugin.learning.data.store.feature_store import Document
from eagle_plugin.learning.train.batches import Batch, pack
from eagle_plugin.learning.train.copies import GpuCopies, SentBatch
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.document_order import (
    DocumentOrder,
    MicroBatch,
    Position,
    assign_documents,
    forward_limit,
)
from eagle_plugin.learning.train.recipe import TrainError, TrainRecipe
from eagle_plugin.learning.train.schedule import learning_factor, phase_at, spent_share
from eagle_plugin.learning.train.sources import Source, mask_out

AHEAD = 2  # updates whose documents are read while the head computes
LOOK_S = 0.2  # between two looks whether the run is to stop
EVAL_TOKENS = 2048  # of one forward of the evaluation


@dataclass(frozen=True)
class PlannedUpdate:
    """One update as it was planned."""

    before: Position
    after: Position
    phase: int
    factor: float  # of the learning rates
    micros: list[MicroBatch]  # of this rank


class Feed:
    """The batches of this process. The loop sets `seconds` to the time that the run has used, and `gives_up`."""

    def __init__(self, settings: TrainRecipe, source: Source, ranks: Ranks, mask_token: int | None = None) -> None:
        """mask_token: P-EAGLE's, which must not be in any document."""
        self._settings, self._source, self._ranks, self._mask_token = settings, source, ranks, mask_token
        self._copies = GpuCopies(ranks.device) if ranks.device.type == "cuda" else None
        self.seconds = 0.0
        self.gives_up: Callable[[], bool] = lambda: False  # asked while documents are waited for
        self.gave_up = False
        items = source.items
        self._train = [i for i, item in enumerate(items) if item.split == "train"]
        weights = [items[i].weight for i in self._train]
        self.order = DocumentOrder([items[i].length for i in self._train], weights, settings.seed)
        self._val = self._choose_val()

    def progress(self, position: Position) -> float:
        """The share of the budget that is spent at a position."""
        return spent_share(
            self._settings.budget,
            tokens=position.tokens,
            epochs=self.order.epochs(position),
            updates=position.update,
            seconds=self.seconds,
        )

    @contextlib.contextmanager
    def open(self, position: Position) -> Iterator[Iterator[tuple[PlannedUpdate, list[Batch]]]]:
        """Iterate over the updates from `position` to the end of the budget, as (step, its batches)."""
        readers = self._source.readers
        pool = ThreadPoolExecutor(readers, "prefetch") if readers else None
        try:
            yield self._generate(position, pool)
        finally:
            if pool is not None:  # what is being read is not waited for: servers may be gone
                pool.shutdown(wait=False, cancel_futures=True)

    def held_out(self) -> Iterator[Batch]:
        """The batches that this process evaluates on; every process has the same number."""
        for micro in self._assign(self._val, EVAL_TOKENS) if self._val else ():
            yield from (sent.receive() for sent in self._read([micro]))

    @property
    def evaluates(self) -> bool:
        """Whether the recipe asks for an evaluation."""
        return bool(self._val)

    def _generate(
        self, position: Position, pool: ThreadPoolExecutor | None
    ) -> Iterator[tuple[PlannedUpdate, list[Batch]]]:
        planned: deque[tuple[PlannedUpdate, Future[list[SentBatch]] | None]] = deque()
        ahead = 0 if pool is None else max(AHEAD, self._source.readers)
        minutes = self._settings.budget.minutes
        while True:
            while len(planned) <= ahead and (step := self._plan_step(position)) is not None:
                position = step.after
                planned.append((step, pool.submit(self._read, step.micros) if pool is not None else None))
            # When the time is over, updates that were planned in advance are not trained on.
            if not planned or (minutes is not None and self.seconds >= 60 * minutes):
                return
            step, future = planned.popleft()
            if future is None:
                yield step, [sent.receive() for sent in self._read(step.micros)]
                continue
            while not wait([future], LOOK_S).done:
                if self.gives_up():
                    self.gave_up = True
                    return
            yield step, [sent.receive() for sent in future.result()]

    def _plan_step(self, position: Position) -> PlannedUpdate | None:
        settings = self._settings
        progress = self.progress(position)
        if progress >= 1 - 1e-9:
            return None
        phase = phase_at(settings.phases, progress)
        options = settings.phases[phase]
        chosen, after = self.order.next_batch(position, options.batch_tokens or settings.batch_tokens)
        limit = forward_limit(settings.micro_tokens, self._ranks.device.type)
        micros = self._assign([self._train[i] for i in chosen], limit)
        return PlannedUpdate(position, after, phase, learning_factor(settings.optimiser, options, progress), micros)

    def _assign(self, documents: list[int], micro_tokens: int | None) -> list[MicroBatch]:
        lengths = [self._source.items[i].length for i in documents]
        return assign_documents(documents, lengths, self._ranks.world, micro_tokens)[self._ranks.rank]

    def _read(self, micros: Sequence[MicroBatch]) -> list[SentBatch]:
        batches = []
        for micro in micros:
            documents = self._source.read(micro.documents)
            if self._mask_token is not None:
                self._check_mask_token(documents, self._mask_token)
            if micro.idle:
                documents = [mask_out(document) for document in documents]
            if self._copies is not None and documents[0].last.device.type == "cpu":
                batches.append(self._copies.send(documents))
            else:
                batches.append(SentBatch(pack(documents).to(self._ranks.device).expand()))
        return batches

    def _check_mask_token(self, documents: Sequence[Document], token: int) -> None:
        for document in documents:
            if bool((document.ids == token).any()):
                raise TrainError(
                    f"document {document.id!r} holds token {token}, which the head uses as its mask; "
                    "name a token that never occurs as head.mask_token_id and train in another folder (--out)"
                )

    def _choose_val(self) -> list[int]:
        wanted, items = self._settings.eval_tokens, self._source.items
        held_out = [i for i, item in enumerate(items) if item.split == "val"]
        if wanted and not held_out:
            raise TrainError(
                "the data has no document of split val to evaluate on; "
                "hold some rows out when preparing the prompts, or set eval_tokens to 0"
            )
        generator = torch.Generator().manual_seed(self._settings.seed)
        chosen: list[int] = []
        tokens = 0
        for place in torch.randperm(len(held_out), generator=generator).tolist():
            if tokens >= wanted:
                break
            chosen.append(held_out[place])
            tokens += items[held_out[place]].length
        return chosen
