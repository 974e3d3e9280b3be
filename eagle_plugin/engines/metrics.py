"""The plugin's Prometheus metrics: one set of names in every engine (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PREFIX = "eagle_plugin:"
_registered: list[Any] = []


def forget() -> None:
    """Take the metrics of an earlier engine out of this process's registry."""
    from prometheus_client import REGISTRY

    while _registered:
        REGISTRY.unregister(_registered.pop())


class RoundMetrics:
    """What the verify rounds of this process yield; a new object takes the place of an older one.

    A round is one request's tree in one forward of the target.
    """

    def __init__(self, label_names: Sequence[str], depth: int) -> None:
        """Register the metrics with the labels of the engine's own; depth is that of the deepest path of drafts."""
        # Not before: the client looks for PROMETHEUS_MULTIPROC_DIR, which engines set, when it is imported.
        from prometheus_client import Counter, Histogram

        forget()

        def counter(name: str, what: str, *more: str) -> Any:
            _registered.append(Counter(PREFIX + name, what, [*label_names, *more]))
            return _registered[-1]

        self._depth = depth
        self._rounds = counter("verify_rounds", "Trees that the target verified.")
        self._drafted = counter("drafted_tokens", "Drafted tokens that the target verified.")
        self._accepted = counter("accepted_tokens", "Drafted tokens that were kept.")
        self._at_depth = counter("accepted_at_depth", "Rounds that kept a drafted token of this depth.", "depth")
        self._lengths = Histogram(
            PREFIX + "accept_length",
            "Tokens that a round yields, the target's own (bonus) token included.",
            label_names,
            buckets=range(1, depth + 2),
        )
        _registered.append(self._lengths)

    def labelled(self, *values: str) -> Recorder:
        """The metrics under these values of the labels."""
        return Recorder(
            self._rounds.labels(*values),
            self._drafted.labels(*values),
            self._accepted.labels(*values),
            self._lengths.labels(*values),
            [self._at_depth.labels(*values, str(depth)) for depth in range(1, self._depth + 1)],
        )


class Recorder:
    """One engine's metrics."""

    def __init__(self, rounds: Any, drafted: Any, accepted: Any, lengths: Any, at_depth: list[Any]) -> None:
        self._rounds, self._drafted, self._accepted = rounds, drafted, accepted
        self._lengths, self._at_depth = lengths, at_depth

    def record(self, kept: Sequence[int], drafted: int) -> None:
        """Count rounds; kept has the accepted draft tokens of each, drafted is the number of draft tokens of all."""
        self._rounds.inc(len(kept))
        self._drafted.inc(drafted)
        self._accepted.inc(sum(kept))
        for tokens in kept:
            self._lengths.observe(tokens + 1)
        for depth, counter in enumerate(self._at_depth, start=1):
            counter.inc(sum(tokens >= depth for tokens in kept))
