"""What is captured at start-up: how many graphs, and beside which objects of the server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.policy.shapes import captured_shapes, shape_for
from eagle_plugin.runtime import capturing
from eagle_plugin.runtime.captured_rounds import fits
from eagle_plugin.runtime.capturing import gpu_sizes


@pytest.mark.parametrize(("most", "sizes", "graphs"), [(256, 20, 560), (1024, 24, 613)])
def test_how_many_graphs_vllm_gets(most: int, sizes: int, graphs: int) -> None:
    """The numbers of docs/gpu.md, of 3 drafted tokens.

    Per size verify of each width, plain steps too; and of each shape draft, sums, walk and extend, for greedy and for
    sampled batches.
    """
    shapes = [shape for shape in captured_shapes(shape_for(3, on_gpu=True)) if shape != PLAIN]
    captured = [[shape for shape in shapes if fits(shape, size)] for size in gpu_sizes(most)]
    assert sum(map(bool, captured)) == sizes
    assert sum(1 + len({shape.width for shape in trees}) + 2 * 4 * len(trees) for trees in captured) == graphs


@pytest.mark.parametrize("by_engine", [0, 1000], ids=["at the start", "later"])
def test_what_an_engine_has_frozen_stays_frozen(by_engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange of the head captures in a server that has kept its objects from the collector since its start."""
    frozen = [by_engine]
    functions = {
        "collect": lambda: 0,
        "freeze": lambda: frozen.append(frozen[-1] + 10),
        "unfreeze": lambda: frozen.append(0),
        "get_freeze_count": lambda: frozen[-1],
    }
    monkeypatch.setattr(capturing, "gc", SimpleNamespace(**functions))
    with capturing._frozen_garbage():
        assert frozen[-1] == by_engine + 10
    assert frozen[-1] >= by_engine and (frozen[-1] > 0) is (by_engine > 0)
