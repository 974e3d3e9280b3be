"""Documents are put together from the rows of steps, whatever comes in between; what is not whole is counted."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from eagle_plugin.collect.collector import Collector, Ending, StepRows, _Copy
from eagle_plugin.collect.recorder import Collected

WIDTH, HIDDEN = 4, 1
NEVER = Ending(frozenset(), 0, 1000)


class Kept:
    """A queue that keeps what it is offered."""

    def __init__(self) -> None:
        self.documents: dict[str, Collected] = {}
        self.dropped = Counter[str]()

    def offer(self, exchange: Collected) -> None:
        self.documents[exchange.id] = exchange

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1


def state(token: int, position: int) -> list[float]:
    return [float(token), float(position), 1.0, 2.0]


def rows(*requests: tuple[str, int, list[int], int], padding: int = 0) -> StepRows:
    """A step of (name, first position, tokens, the token after them), each with so many rows of padding."""
    ids = [token for _, _, tokens, _ in requests for token in [*tokens, *[999] * padding]]
    positions = [first + i for _, first, tokens, _ in requests for i in range(len(tokens) + padding)]
    return StepRows(
        [name for name, *_ in requests],
        [len(tokens) + padding for _, _, tokens, _ in requests],
        torch.tensor([len(tokens) for _, _, tokens, _ in requests]),
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor([state(token, place) for token, place in zip(ids, positions, strict=True)]),
        torch.tensor([after for *_, after in requests]),
    )


def make(max_length: int = 100, most_bytes: int = 1 << 20) -> tuple[Collector, Kept]:
    kept = Kept()
    return Collector(kept, HIDDEN, max_length, most_bytes), kept


def states_of(found: Collected) -> list[list[float]]:
    parts = [torch.cat(part, 1) for part in found.parts]
    assert all(one.is_contiguous() for part in found.parts for one in part)
    return torch.cat(parts).tolist()


def check(found: Collected, ids: list[int], known: int) -> None:
    """All tokens, with the states of the first ones."""
    assert found.ids == ids
    wanted = [state(token, place) for place, token in enumerate(ids[:known])]
    assert states_of(found) == wanted + [[0.0] * WIDTH] * (len(ids) - known)


def test_chunks_of_a_prompt_and_paths_of_trees() -> None:
    collector, kept = make()
    collector.begin("r", "doc", "s", "val", 5, None, Ending(frozenset({2}), 0, 100))
    collector.begin("q", "other", "s", "train", 1, None, Ending(frozenset(), 0, 3))
    collector.add(rows(("r", 0, [10, 11, 12], 999)))
    collector.add(rows(("r", 3, [13, 14], 20), ("q", 0, [50], 51), ("nobody", 0, [1], 1)))
    collector.add(rows(("r", 5, [20, 21, 22], 23), ("q", 1, [51], 52), padding=2))
    assert not kept.documents and len(collector) == 2
    collector.add(rows(("q", 2, [52], 53), ("r", 8, [23, 2, 77], 78), padding=1))  # the end token is inside of the path
    check(kept.documents["doc"], [10, 11, 12, 13, 14, 20, 21, 22, 23, 2], 9)
    check(kept.documents["other"], [50, 51, 52, 53], 3)
    assert (kept.documents["doc"].prompt, kept.documents["doc"].split, kept.documents["doc"].given) == (5, "val", False)
    assert not len(collector) and not kept.dropped and collector._bytes == 0


def test_a_preempted_request_begins_again() -> None:
    collector, kept = make()
    collector.begin("r", "doc", "s", "train", 2, None, Ending(frozenset(), 0, 4))
    collector.add(rows(("r", 0, [10, 11], 20)))
    collector.add(rows(("r", 2, [20, 21], 22)))
    collector.begin("r", "doc", "s", "train", 2, None, NEVER)  # as an engine may tell it a second time
    collector.add(rows(("r", 0, [10, 11, 20], 999)))
    collector.add(rows(("r", 3, [21, 22], 23)))
    check(kept.documents["doc"], [10, 11, 20, 21, 22, 23], 5)


def test_what_is_given_has_the_states_of_all_tokens() -> None:
    collector, kept = make()
    collector.begin("r", "doc", "s", "train", 4, 2, NEVER)
    collector.add(rows(("r", 0, [10, 11, 12, 13], 99)))
    check(kept.documents["doc"], [10, 11, 12, 13], 4)
    assert kept.documents["doc"].prompt == 2 and kept.documents["doc"].given and not kept.documents["doc"].earlier
    collector.begin("s", "dialogue", "s", "train", 4, 3, NEVER, ((1, 2),))
    collector.add(rows(("s", 0, [10, 11, 12, 13], 99)))
    assert kept.documents["dialogue"].earlier == ((1, 2),)


def test_long_documents_keep_the_states_of_their_first_tokens() -> None:
    collector, kept = make(max_length=4)
    collector.begin("r", "doc", "s", "train", 3, None, Ending(frozenset(), 0, 5))
    collector.add(rows(("r", 0, [10, 11, 12], 20)))
    collector.add(rows(("r", 3, [20, 21, 22, 23], 24)))
    found = kept.documents["doc"]
    assert found.ids == [10, 11, 12, 20, 21, 22, 23, 24] and found.rows == 4
    assert states_of(found)[-1] == state(20, 3), "the state of a token that is not the last one is known"


def test_what_is_not_whole_is_dropped_and_counted() -> None:
    collector, kept = make(most_bytes=40)
    collector.begin("cached", "a", "s", "train", 4, None, NEVER)
    collector.add(rows(("cached", 2, [12, 13], 20)))  # the first tokens were found in a prefix cache
    collector.begin("aborted", "b", "s", "train", 2, None, NEVER)
    collector.add(rows(("aborted", 0, [10, 11], 20)))
    collector.begin("large", "c", "s", "train", 4, None, NEVER)
    collector.add(rows(("large", 0, [10, 11, 12, 13], 20)))
    collector.finish(["cached", "aborted", "large", "unknown"])
    collector.drop("not_text_of_the_target")
    wanted = {"not_from_start": 1, "unfinished": 1, "queue_full": 1, "not_text_of_the_target": 1}
    assert kept.dropped == wanted and not kept.documents and collector._bytes == 0


def test_where_answers_end() -> None:
    ending = Ending(frozenset({2}), 3, 5)
    assert ending.length([1, 2, 1]) is None  # too early for an end token
    assert ending.length([1, 2, 2, 1]) == 3
    assert ending.length([1, 1, 1, 1, 1, 2]) == 5  # the limit comes first
    assert ending.length([1, 1, 1, 1]) is None


class Failing(Kept):
    """The first document that it is offered raises."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.took = True, threading.Event()

    def offer(self, exchange: Collected) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("no memory")
        super().offer(exchange)
        self.took.set()


@pytest.mark.parametrize("waits", [False, True], ids=["the engine's thread", "the thread that waits for copies"])
def test_an_error_breaks_one_document_and_is_told(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    kept = Failing()
    collector = Collector(kept, HIDDEN, 100, 1 << 20)
    for name in "ab":
        collector.begin(name, f"doc-{name}", "s", "train", 1, None, Ending(frozenset(), 0, 3))
    step = rows(*((name, 0, [10, 11, 12], 13) for name in "ab"))
    if waits:
        collector._copies.append(_Copy(step._replace(states=step.states.bfloat16()), None))
        threading.Thread(target=collector._wait_for_copies, daemon=True).start()
        assert kept.took.wait(60)
    else:
        collector.add(step)
    check(kept.documents["doc-b"], [10, 11, 12, 13], 3)
    assert kept.dropped == {"failed": 1} and not len(collector) and collector._bytes == 0
    (record,) = caplog.records
    assert record.exc_info is not None and "hidden states of a request are not stored" in record.getMessage()


def test_an_error_in_the_middle_of_a_document_breaks_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were computed anew took the place of others before it; what is kept is counted all the same."""
    collector, kept = make()
    for name in "ab":
        collector.begin(name, f"doc-{name}", "s", "train", 1, None, Ending(frozenset(), 0, 4))
    collector.add(rows(*((name, 0, [10, 11, 12], 13) for name in "ab")))
    split, calls = collector._split, list[int]()

    def fails_once(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(states))
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return split(states)

    monkeypatch.setattr(collector, "_split", fails_once)
    collector.add(rows(*((name, 1, [11, 12], 13) for name in "ab")))
    collector.add(rows(*((name, 3, [13, 14], 15) for name in "ab")))
    collector.finish("ab")
    check(kept.documents["doc-b"], [10, 11, 12, 13, 14], 4)
    assert kept.dropped == {"failed": 1} and collector._bytes == 0
