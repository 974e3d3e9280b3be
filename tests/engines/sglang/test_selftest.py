"""The self-test of the real round finds nothing in a healthy one and names planted faults: a wrong kernel, a stale
graph, a skewed mask."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

import toy_engine
from large_tensors import LargeTensors
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from toy_engine import COLUMNS, ROWS, SHAPE, Drafter
from toy_parts import SIZES, parts

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.runtime import accept
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.selftest import comparison
from eagle_plugin.selftest.failure import LeftOut
from eagle_plugin.sglang import selftest
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.dummy_batches import RandomBatches
from eagle_plugin.sglang.round_test import Parts, RoundTest


@pytest.fixture(scope="module")
def recorded() -> Iterator[None]:
    """Launches of native kernels are seen by captures."""
    with recording_launches():
        yield


def test_a_healthy_round_passes(recorded: None) -> None:
    made = parts()
    test = RoundTest(made)
    assert test.run() == []
    # 2 sizes, 2 shapes, greedy and sampled, on two batches each; 4 functions in each round.
    assert len(test.fingerprints) == 16 and len(set(test.fingerprints)) == 16
    assert made.decode_round.functions.replays == 4 * 16
    assert test.longest == SHAPE.max_accept_length
    # Nothing is left behind.
    assert sorted(made.allocator.free_slots.tolist()) == list(range(1, ROWS * COLUMNS))
    assert not made.req_to_token.any() and not made.rng_keys.any()


def test_without_graphs_the_tree_is_tested_and_ranks_can_be_compared() -> None:
    made = parts([])
    test = RoundTest(made)
    assert test.run() == [] and test.fingerprints
    assert test.fingerprints == again(parts([])).fingerprints
    assert made.decode_round.functions.replays == 0


def again(made: Parts) -> RoundTest:
    test = RoundTest(made)
    test.run()
    return test


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_round_over_8_bit_caches_passes(recorded: None, dtype: torch.dtype) -> None:
    """The engine keeps their bytes; what is put there has to be numbers."""
    pools = tuple(MHATokenToKVPool(ROWS * COLUMNS, 1, dtype, 2, toy_engine.D, 1, "cpu", False) for _ in range(2))
    made = parts(pools=pools)
    assert {cache.dtype for cache, _ in made.caches} == {torch.uint8}
    with RandomBatches(made).borrowed(8, 40) as rows:
        slots = made.req_to_token[rows, :40].long().flatten()
        for cache, pool in made.caches:
            values = cache[slots].view(pool.buffers.dtype).float()
            assert not bool(values.isnan().any()) and 0.8 < float(values.std()) < 1.2
    test = RoundTest(made)
    assert test.run() == [] and test.longest == SHAPE.max_accept_length


def test_a_small_cache_is_enough(recorded: None) -> None:
    """Fewer requests than the padded batch."""
    made = parts()
    made.allocator.free_slots = made.allocator.free_slots[:70]
    assert RoundTest(made).run() == []
    made.allocator.free_slots = made.allocator.free_slots[:5]
    with pytest.raises(RuntimeError, match="has no 22 free slots for the self-test"):
        RoundTest(made).run()


# --- planted faults


def test_a_skewed_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of verified trees alone: forwards of one node and those of the head see what they should."""
    healthy = toy_engine.tree_attention

    def skewed(*arguments: Any, **options: Any) -> Tensor:
        *others, ancestors = arguments
        return healthy(*others, ancestors << 1 | 1 if ancestors.shape[1] == SHAPE.width else ancestors, **options)

    monkeypatch.setattr(toy_engine, "tree_attention", skewed)
    (reason,) = RoundTest(parts([])).run()
    assert reason.startswith("a tree in one forward of the target: the logits of ")
    assert "nodes differ from those of their paths token by token, by " in reason


def test_wrong_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = toy_engine.ToyModel.__call__

    def shifted(model: Any, tokens: Tensor, positions: Tensor, slots: Tensor, info: Any) -> Any:
        moved = positions * 5 if info.tree_rows.ancestors.shape[1] == SHAPE.width else positions
        return healthy(model, tokens, moved, slots, info)

    monkeypatch.setattr(toy_engine.ToyModel, "__call__", shifted)
    assert any("a tree in one forward" in reason for reason in RoundTest(parts([])).run())


class Stale:
    """A graph whose results are always those of its first replay."""

    def __init__(self, graph: Any, result: Any) -> None:
        self._graph, self._kept = graph, None
        self._results = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]

    def replay(self) -> None:
        self._graph.replay()
        if self._kept is None:
            self._kept = [x.clone() for x in self._results]
        for x, old in zip(self._results, self._kept, strict=True):
            x.copy_(old)


@pytest.mark.parametrize("phase", ["draft", "verify", "walk", "extend"])
def test_a_stale_graph_is_found_and_named(recorded: None, phase: str) -> None:
    made = parts()
    captured = made.decode_round.functions._captured
    for key in [key for key in captured if key[0] == phase]:
        captured[key] = Stale(*captured[key]), captured[key][1]
    reasons = RoundTest(made).run()
    assert {reason.split(": ")[1] for reason in reasons} == {phase}
    batches = {reason.partition(":")[0] for reason in reasons}
    assert {f"graphs of {size} requests, greedy, trees {SHAPE}" for size in SIZES} <= batches


def test_one_stale_lane_of_many_is_found(recorded: None) -> None:
    made = parts([4])
    captured = made.decode_round.functions._captured
    key = next(key for key in captured if key[0] == "verify" and key[2] == SHAPE.width)
    graph, output = captured[key]

    class OneLane:
        def replay(self) -> None:
            graph.replay()
            output.logits[: SHAPE.width] = 1.0

    captured[key] = OneLane(), output
    assert any("verify: logits: 16 of 64 rows differ" in reason for reason in RoundTest(made).run())


def test_a_batch_without_memory_is_left_out(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are tested, and it is no difference."""
    made, healthy = parts(), DecodeRound.verify

    def tight(of: Any, batch: Any, drafts: Any) -> Any:
        if of is not made.decode_round and batch.padded_b == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return healthy(of, batch, drafts)

    monkeypatch.setattr(DecodeRound, "verify", tight)
    test = RoundTest(made)
    found = test.run()
    assert len(found) == 4 and all(isinstance(x, LeftOut) and x.startswith("graphs of 4 requests, ") for x in found)
    assert len(test.fingerprints) == 8  # of one request
    assert sorted(made.allocator.free_slots.tolist()) == list(range(1, ROWS * COLUMNS))


def test_a_tree_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts([])

    def tight(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RoundTest, "_one_token", tight)
    (left_out,) = RoundTest(made).run()
    assert isinstance(left_out, LeftOut) and left_out.startswith("tree against paths: ")


def test_the_logits_are_not_copied(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside captured graphs there may be room for the logits of one forward, which is what serves without graphs."""
    monkeypatch.setattr(comparison, "AT_ONCE", SHAPE.width * toy_engine.V)
    made = parts([4])
    size = 4 * SHAPE.width * toy_engine.V * 4
    with LargeTensors(size) as forward:
        batch = made.reader.padding(SHAPE, 4, True)
        made.verifier.forward(batch, DraftTree.padding(torch.zeros(4, dtype=torch.int64), SHAPE.width))
    with LargeTensors(size) as tested:
        assert RoundTest(made).graphs_against_eager() == []
    assert set(tested.made) == set(forward.made) != set()


def test_a_function_that_raises_is_named(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts([4])

    def broken(*arguments: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered\nmore")

    monkeypatch.setattr(made.decode_round, "walk", broken)
    reasons = RoundTest(made).run()
    assert len(reasons) == 4
    assert f"graphs of 4 requests, greedy, trees {SHAPE}: RuntimeError: an illegal memory access was encoun" in str(
        reasons
    )
    assert not made.req_to_token.any() and len(made.allocator.free_slots) == ROWS * COLUMNS - 1


class Baked(Drafter):
    """What the host read during the capture: a length."""

    kept: Tensor | None = None

    def extend(self, batch: Any, accepted: Any, path: Any, hidden: Tensor) -> Any:
        state = super().extend(batch, accepted, path, hidden)
        if self.kept is None or len(self.kept) != len(state.roots):
            self.kept = state.roots.clone()
        return state._replace(roots=self.kept + 0)


def test_a_value_kept_by_python_is_found(recorded: None) -> None:
    reasons = RoundTest(parts([4], Baked)).run()
    assert any("extend: roots" in reason for reason in reasons), reasons


def test_a_wrong_kernel_between_forwards_is_found(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move of keys and values that is captured right and runs wrong as it is, or the other way round."""
    made = parts([4])
    monkeypatch.setattr(accept, "compact_kv", lambda *arguments, **options: None)
    assert any("extend: moved keys and values" in reason for reason in RoundTest(made).run())


def test_ranks_that_accept_other_tokens_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that serve the same requests: two groups of data-parallel attention accept what they like."""
    from sglang.srt import runtime_context

    alike = SimpleNamespace(attn_tp_size=4)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: alike)
    monkeypatch.setattr(selftest, "gather_objects", lambda found: [found, found, [*found[:-1], found[-1] + 1]])
    (reason,) = selftest.test_rounds(parts([]))
    assert reason.startswith("ranks 2 accepted other tokens than rank 0 in test round ")
    monkeypatch.setattr(selftest, "gather_objects", lambda found: [found, list(found)])
    assert selftest.test_rounds(parts([])) == []
    alike.attn_tp_size = 1
    monkeypatch.setattr(selftest, "gather_objects", lambda found: [found, [*found[:-1], found[-1] + 1]])
    assert selftest.test_rounds(parts([])) == []
