"""Puts the states of a worker's steps together to documents, on the host, and hands over those that are finished."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_plugin.collect.recorder import Collected, FeatureRecorder, Rows, Spans
from eagle_plugin.collect.settings import CollectSettings

NOT_FROM_START = "not_from_start"  # reasons why a document is dropped, as the metric names them
UNFINISHED = "unfinished"
QUEUE_FULL = "queue_full"
FAILED = "failed"  # an error of ours: the log has it

logger = logging.getLogger("eagle_plugin")


class Queue(Protocol):
    """What takes finished documents: `recorder.FeatureRecorder`."""

    def offer(self, exchange: Collected) -> None: ...

    def drop(self, reason: str) -> None: ...


class Ending(NamedTuple):
    """Where the engine ends an answer, of which a worker alone knows only what was computed."""

    stops: frozenset[int]  # tokens that end it
    least: int  # tokens before one of these may
    most: int  # tokens

    def length(self, answer: Sequence[int]) -> int | None:
        """Tokens of the answer among those that were computed; None if it has not ended."""
        places = range(max(0, self.least - 1), min(len(answer), self.most))
        stop = next((i + 1 for i in places if answer[i] in self.stops), None)
        if stop is not None:
            return stop
        return self.most if len(answer) >= self.most else None


class StepRows(NamedTuple):
    """Rows of one step of the requests that ask for them, one request after another, on the device of the step."""

    names: list[str]
    spans: list[int]  # rows of each; those after its count are padding
    counts: Tensor  # [k] int64
    ids: Tensor  # [r] int32 or int64: the tokens of the rows
    positions: Tensor  # [r] int64
    states: Tensor  # [r, W]: aux states and last states side by side
    following: Tensor  # [k] int64: the token after each request's last row that counts


@dataclass
class _Open:
    """A document that is not finished."""

    id: str
    source: str
    split: str
    prompt: int  # tokens of the prompt
    given: int | None  # of them before the answer, where the prompt has it
    ending: Ending
    earlier: Spans = ()  # answers in the prompt
    ids: list[int] = field(default_factory=list)  # of all rows
    following: int | None = None  # the token after them
    parts: list[Rows] = field(default_factory=list)  # states of the first rows
    kept: int = 0  # rows of `parts`
    broken: str = ""  # why it will be dropped

    def has_ended(self, newest: int) -> bool:
        """Whether all of it was computed; newest: rows since this was asked last."""
        if self.given is not None:
            return len(self.ids) >= self.prompt
        answer = len(self.ids) + 1 - self.prompt
        more = {*self.ids[-newest:], self.following}
        may_end = answer >= self.ending.most or not self.ending.stops.isdisjoint(more)
        return answer > 0 and may_end and self.ending.length(self.all_ids()[self.prompt :]) is not None

    def all_ids(self) -> list[int]:
        """All tokens that are known."""
        return self.ids if self.following is None else [*self.ids, self.following]

    def cut(self, n: int) -> None:
        """Forget what comes after n rows: the engine has computed them anew, after a preemption."""
        del self.ids[n:]
        while self.kept > n:
            part = self.parts.pop()
            self.kept -= len(part.last)
            if self.kept < n:
                self.parts.append(part.first(n - self.kept))
                self.kept = n


@dataclass
class _Copy:
    """What is on its way to the host."""

    rows: StepRows  # on the host, when the event has come
    event: torch.Event | None


class Collector:
    """The documents of one worker. All calls are made by the thread that runs the steps.

    On a device with streams a thread of the collector's own waits for the copies: after the last step of a request
    nobody may call it for long.
    """

    def __init__(self, queue: Queue, hidden: int, max_length: int, most_bytes: int) -> None:
        """Begin with no documents.

        Args:
            hidden: H, the last columns of states; those before it are of aux layers.
            max_length: rows of a document that are kept.
            most_bytes: of all documents that are not finished.
        """
        self._queue, self._hidden, self._max_length, self._most_bytes = queue, hidden, max_length, most_bytes
        self._open: dict[str, _Open] = {}
        self._copies: deque[_Copy] = deque()
        self._bytes, self._has_failed = 0, False
        self._changed = threading.Condition()
        self._waiter: threading.Thread | None = None

    @classmethod
    def of(cls, settings: CollectSettings, show: Callable[[Counter[str]], None] = lambda totals: None) -> Collector:
        """The collector of a worker, with its writer process; show as of `FeatureRecorder`. Raises CollectError."""
        assert settings.facts is not None
        recorder = FeatureRecorder(settings, show)
        return cls(recorder, settings.facts.hidden_size, settings.max_length, settings.queue_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        name: str,
        id: str,
        source: str,
        split: str,
        prompt: int,
        given: int | None,
        ending: Ending,
        earlier: Spans = (),
    ) -> None:
        """A request has come; one that has come before, and was preempted, goes on."""
        with self._changed:
            self._open.setdefault(name, _Open(id, source, split, prompt, given, ending, earlier))

    def drop(self, reason: str) -> None:
        """Count a request whose states cannot be stored."""
        self._queue.drop(reason)

    def add(self, rows: StepRows) -> None:
        """Take the rows of a step; what it was made of may be overwritten by the next one."""
        states = rows.states.to(torch.bfloat16)
        if states.device.type == "cpu":
            self._copies.append(_Copy(rows._replace(states=states), None))
            self._take()
            return
        copied = rows._replace(
            counts=_to_host(rows.counts),
            ids=_to_host(rows.ids),
            positions=_to_host(rows.positions),
            states=_to_host(states),
            following=_to_host(rows.following),
        )
        event = torch.Event(states.device)
        event.record()
        with self._changed:
            self._copies.append(_Copy(copied, event))
            self._changed.notify()
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait_for_copies, daemon=True)
            self._waiter.start()

    def finish(self, names: Iterable[str]) -> None:
        """These requests have ended: hand over what they have."""
        with self._changed:
            ended = [name for name in names if name in self._open]
            while ended and self._copies:
                self._take()
            for name in ended:
                if document := self._open.pop(name, None):
                    self._end(document)

    def _wait_for_copies(self) -> None:
        while True:
            with self._changed:
                while not self._copies:
                    self._changed.wait()
                event = self._copies[0].event
            if event is not None:
                event.synchronize()
            with self._changed:
                while self._copies and (self._copies[0].event is event or _is_here(self._copies[0])):
                    self._take()

    def _end(self, document: _Open) -> None:
        self._bytes -= sum(part.nbytes for part in document.parts)
        if not document.broken:
            try:
                document.broken = self._queue_up(document)
            except Exception as error:  # else no thread would take what comes later
                document.broken = self._reason_of(error)
        if document.broken:
            self._queue.drop(document.broken)

    def _take(self) -> None:
        copy, begin = self._copies.popleft(), 0
        rows = copy.rows
        if copy.event is not None:
            copy.event.synchronize()
        lists = rows.counts.tolist(), rows.following.tolist()
        for name, span, count, following in zip(rows.names, rows.spans, *lists, strict=True):
            document = self._open.get(name)
            if document is not None and not document.broken and count:
                has_ended = False
                try:
                    self._append(document, rows, slice(begin, begin + count), following)
                    has_ended = not document.broken and document.has_ended(count)
                except Exception as error:  # as in `_end`
                    self._break(document, self._reason_of(error))
                if has_ended:
                    self._end(self._open.pop(name))
            begin += span

    def _append(self, document: _Open, rows: StepRows, part: slice, following: int) -> None:
        first = int(rows.positions[part.start])
        if first > len(document.ids):
            self._break(document, NOT_FROM_START)
            return
        before, row_bytes = document.kept, rows.states.shape[1] * rows.states.element_size()
        document.cut(first)
        self._bytes -= (before - document.kept) * row_bytes
        document.ids += rows.ids[part].tolist()
        document.following = following
        if document.kept < self._max_length:
            # Of this request alone: a view would keep all rows of the step. It is the only copy on the host, and
            # brings the states into the order that they have in the store.
            new = rows.states[part][: self._max_length - document.kept]
            aux, last = (one.clone(memory_format=torch.contiguous_format) for one in self._split(new))
            document.parts.append(Rows(aux, last))
            document.kept += len(last)
            self._bytes += len(last) * row_bytes
        if self._bytes > self._most_bytes:
            self._break(document, QUEUE_FULL)

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return states[:, : -self._hidden], states[:, -self._hidden :]

    def _break(self, document: _Open, reason: str) -> None:
        document.broken = reason
        self._bytes -= sum(part.nbytes for part in document.parts)
        document.parts.clear()

    def _reason_of(self, error: Exception) -> str:
        """Why a document is dropped that an error broke. The log has the first such error."""
        if not self._has_failed:
            self._has_failed = True
            logger.error("eagle-plugin: hidden states of a request are not stored because of an error", exc_info=error)
        return FAILED

    def _queue_up(self, document: _Open) -> str:
        """Queue a finished document; the reason why it is dropped, "" if it is not."""
        ids = document.all_ids()
        if document.given is not None:
            length, prompt = document.prompt, document.given
            if len(document.ids) < length:
                return UNFINISHED
        else:
            answer = document.ending.length(ids[document.prompt :])
            if answer is None:
                return UNFINISHED
            length, prompt = document.prompt + answer, document.prompt
        ids, parts, kept = ids[:length], document.parts, document.kept
        if document.given is None and kept >= length - 1 and length <= self._max_length:
            # The state of an answer's last token: an engine does not compute it, unless it was a draft. Training reads
            # no state after which there is no token, so it is zero for all.
            document.cut(length - 1)
            zero = torch.zeros(1, parts[0].aux.shape[1] + self._hidden, dtype=torch.bfloat16)
            parts.append(Rows(*(one.contiguous() for one in self._split(zero))))
        elif kept > length:
            document.cut(length)
        is_given = document.given is not None
        found = Collected(document.id, document.source, document.split, ids, prompt, is_given, parts, document.earlier)
        self._queue.offer(found)
        return ""


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _is_here(copy: _Copy) -> bool:
    return copy.event is None or copy.event.query()
