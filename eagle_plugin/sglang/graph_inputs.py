"""Takes back what dropped captures left in the lists of the engine's all-reduce, which pairs them over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang.srt.distributed import parallel_state

from eagle_plugin.runtime.ranks import ended_in_all_ranks
from eagle_plugin.sglang.ranks import in_any_rank


@contextmanager
def captures() -> Iterator[None]:
    """The engine's context of captures; what is raised in it leaves nothing of them for the engine's own captures.

    At its end each rank registers what it has captured; what is raised there in one rank is raised in all of them.
    """
    drop = mark_inputs()
    try:
        with ended_in_all_ranks(parallel_state.graph_capture(), in_any_rank):
            yield
    except BaseException:
        drop()
        raise


def mark_inputs() -> Callable[[], None]:
    """Note which inputs of all-reduces were captured up to now; a call of the answer drops those captured since.

    A communicator (``CustomAllReduceV2``) lists the inputs of its captured calls. At the end of the captures it pairs
    the lists of all ranks by index: inputs of graphs that are gone would be registered as well, and where one rank had
    captured more of them than another, each later one would be paired with the input of another call.
    """
    before = [(inputs, len(inputs)) for inputs in _inputs()]

    def drop() -> None:
        for inputs, length in before:
            del inputs[length:]

    return drop


def _inputs() -> Iterator[list[tuple[int, int]]]:
    """The lists of the communicators of all groups of this rank; the older kind has its list in C++, out of reach."""
    for group in parallel_state._groups.values():
        inputs = getattr(getattr(group(), "ca_comm", None), "_graph_inputs", None)
        if inputs is not None:
            yield inputs
