"""The self-test finds nothing in healthy kernels and names every planted fault: one per kernel, and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_plugin.kernels import (
    accepted_path,
    attention,
    bf16_linear,
    int8_linear,
    kv,
    loader,
    penalties,
    round_start,
    sampling,
    tree,
)
from eagle_plugin.runtime import graph_emulator
from eagle_plugin.selftest import cache_kernels, sampling_kernels, suite, toy_round, tree_kernels
from eagle_plugin.selftest.failure import LeftOut
from eagle_plugin.selftest.shapes import ModelShape, ModelShapeError
from eagle_plugin.selftest.suite import Report, run_check
from eagle_plugin.selftest.trial import Check, Trial

CPU = torch.device("cpu")
SMALL = ModelShape(
    heads=4, kv_heads=2, head_dim=32, dtype="float32", vocabulary=600, draft_vocabulary=300, steps=3, topk=4, width=16
)
LATENT = replace(SMALL, kv_heads=1, head_dim=576, latent=512)
KERNEL_CHECKS = tree_kernels.CHECKS + sampling_kernels.CHECKS + cache_kernels.CHECKS + cache_kernels.ON_CPU
GRAPH_CHECKS = toy_round.CHECKS


def named(name: str) -> Check:
    (found,) = [check for check in KERNEL_CHECKS + GRAPH_CHECKS if check.name == name]
    return found


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        replace(SMALL, topk=1, width=4),  # a chain: one column of slots per level
        ModelShape(heads=6, kv_heads=2, head_dim=64, window=40, logit_cap=30.0, steps=2, topk=4, width=8),
        replace(SMALL, chunk=8192),
        LATENT,
        replace(SMALL, kv_cache="float8_e4m3fn"),
        pytest.param(replace(SMALL, kv_cache="float8_e5m2", dtype="bfloat16"), marks=pytest.mark.matrix),
    ],
)
def test_healthy_kernels_pass(model: ModelShape) -> None:
    report = suite.run("cpu", model)
    assert report.reasons == []
    assert [finding.check for finding in report.findings] == [check.name for check in KERNEL_CHECKS + GRAPH_CHECKS]
    assert all(finding.compared > 0 for finding in report.findings)


def test_every_kernel_has_a_check() -> None:
    """Every function that a module of kernels lists."""
    modules = (accepted_path, attention, kv, penalties, round_start, sampling, tree)
    listed = {name for module in modules for name in module.__all__ if name.islower()}
    assert listed - {"new_table", "unwritten_table"} | {"int8_linear", "bf16_linear"} == {
        check.name for check in KERNEL_CHECKS
    }


# --- a wrong kernel

# Which output of each native kernel is spoilt, by its place among the arguments.
OUTPUT = {
    "topk_log_softmax": 1, "grow_level": -1, "grow_levels": 0, "select_tree": -2, "sibling_links": -1, "uniforms": -1,
    "propose": -1, "verify_tree": -1, "penalize_nodes": 0, "count_tokens": 0, "tree_attention": -1,
    "extend_attention": -1, "store_kv": 1, "start_round": 5, "read_path": 5, "compact_kv": None,
}  # fmt: skip


class FaultyLibrary:
    """The native library, of which one kernel writes one wrong value."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def get_function(self, name: str) -> Callable[..., Any]:
        native = self._module.get_function(name)
        if name != self._name:
            return native

        def faulty(*arguments: Any) -> Any:
            place = OUTPUT[name]
            if place is None:  # it has no output of its own: the paths are those of another request
                return native(*arguments[:3], arguments[3].flip(0).contiguous(), *arguments[4:])
            done = native(*arguments)
            values = arguments[place].view(-1)
            values[len(values) // 2] += 1
            return done

        return faulty


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Plants a fault in the native kernel of a name."""

    def plant(name: str) -> None:
        monkeypatch.setattr(loader, "wrap_module", lambda module: FaultyLibrary(module, name))
        loader.open_library.cache_clear()
        loader.function.cache_clear()

    yield plant
    monkeypatch.undo()
    loader.open_library.cache_clear()
    loader.function.cache_clear()


@pytest.mark.parametrize("name", OUTPUT)
def test_one_wrong_value_of_a_kernel_is_found(name: str, faulty: Callable[[str], None]) -> None:
    faulty(name)
    finding = run_check(named(name), CPU, SMALL)
    assert finding.differences, "the fault was not found"
    assert finding.sentence.startswith(f"{name}: ")
    others = [check for check in KERNEL_CHECKS if check.name != name]
    assert not [check.name for check in others if run_check(check, CPU, SMALL).differences]


@pytest.mark.parametrize("name", ["tree_attention", "extend_attention", "compact_kv"])
def test_one_wrong_value_of_latent_attention_is_found(name: str, faulty: Callable[[str], None]) -> None:
    faulty(name)
    assert run_check(named(name), CPU, LATENT).differences


def test_a_wrong_bf16_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_check(named("bf16_linear"), CPU, SMALL).differences
    healthy = bf16_linear.linear
    monkeypatch.setattr(bf16_linear, "linear", lambda x, weight, bias: healthy(x, weight, bias.roll(1)))
    assert "product" in run_check(named("bf16_linear"), CPU, SMALL).sentence


def test_a_wrong_int8_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several rows: `pack` itself tries one."""
    healthy = int8_linear.Int8Weight.linear
    wrong = lambda weight, x: healthy(weight, x) * (1.05 if len(x) > 1 else 1)  # noqa: E731
    monkeypatch.setattr(int8_linear.Int8Weight, "linear", wrong)
    assert "product" in run_check(named("int8_linear"), CPU, SMALL).sentence


def test_the_difference_is_told_in_numbers(faulty: Callable[[str], None]) -> None:
    faulty("tree_attention")
    (sentence,) = Report([run_check(named("tree_attention"), CPU, SMALL)]).reasons
    assert "tree_attention: the verified tree: 1 of " in sentence and "in place of" in sentence
    assert sentence.endswith("(and 3 more)")  # a level, the accepted chain, one token


def test_a_kernel_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(tree, "select_tree", broken)
    assert run_check(named("select_tree"), CPU, SMALL).sentence == (
        "select_tree: RuntimeError: no kernel image is available"
    )


def test_a_kernel_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sampling, "verify_tree", tight)
    report = suite.run("cpu", SMALL)
    assert report.reasons == [] and report.left_out
    assert all(isinstance(x, LeftOut) and x.startswith("verify_tree") for x in report.left_out)
    assert suite.differences("cpu", SMALL) == report.left_out


def test_where_rounding_decides_a_second_try_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def once(trial: Trial) -> None:
        seen.append(float(trial.rand(1)))
        if len(seen) == 1:
            trial.differences.append("a draw at the border of two tokens")

    assert not run_check(Check("draws", once, rounding_decides=True), CPU, SMALL).differences
    assert len(set(seen)) == 2
    seen.clear()
    assert run_check(Check("draws", once), CPU, SMALL).differences

    def always(trial: Trial) -> None:
        trial.differences.append("wrong")

    assert run_check(Check("draws", always, rounding_decides=True), CPU, SMALL).differences == ["wrong"]


# --- a skewed mask


def test_a_skewed_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = attention.tree_attention

    def skewed(*arguments: Any, **options: Any) -> Tensor:
        *others, ancestors = arguments
        return healthy(*others, ancestors << 1 | 1, **options)

    monkeypatch.setattr(attention, "tree_attention", skewed)
    finding = run_check(named("tree_attention"), CPU, SMALL)
    assert {difference.partition(":")[0] for difference in finding.differences} == {
        "the verified tree", "a level of the draft", "the accepted chain",
    }  # fmt: skip


# --- a graph that does not do what it did


class OldGraph:
    """A graph that reads the values of the capture."""

    def __init__(self, graph: Any, result: Any) -> None:
        self._kept = torch.utils._pytree.tree_map_only(Tensor, torch.clone, result)
        self._result = result

    def replay(self) -> None:
        leaves = torch.utils._pytree.tree_leaves
        for x, old in zip(leaves(self._result), leaves(self._kept), strict=True):
            x.copy_(old)


@pytest.mark.parametrize("check", GRAPH_CHECKS, ids=lambda check: check.name)
def test_a_stale_graph_is_found(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = graph_emulator.EmulatedCapturer.capture

    def stale(capturer: Any, function: Any) -> Any:
        graph, result = healthy(capturer, function)
        return OldGraph(graph, result), result

    monkeypatch.setattr(graph_emulator.EmulatedCapturer, "capture", stale)
    finding = run_check(check, CPU, SMALL)
    assert any("tree.tokens" in difference for difference in finding.differences)
    assert any("cache" in difference for difference in finding.differences)


def test_a_length_of_the_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most usual fault: a value that the host read while the round was captured."""
    healthy = toy_round.ToyRound._forward

    def baked(toy: Any, rows: Any) -> Any:
        if not hasattr(toy, "kept"):
            toy.kept = rows.positions + 0
            toy.replays = 0
        return healthy(toy, rows._replace(positions=toy.kept.clone()[: len(rows.positions)]))

    monkeypatch.setattr(toy_round.ToyRound, "_forward", baked)
    assert run_check(GRAPH_CHECKS[0], CPU, SMALL).differences


def test_a_host_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = toy_round.ToyRound._forward

    def reads(toy: Any, rows: Any) -> Any:
        assert int(rows.positions[0]) >= 0
        return healthy(toy, rows)

    monkeypatch.setattr(toy_round.ToyRound, "_forward", reads)
    assert "CaptureError: a value of a tensor is read by the host" in run_check(GRAPH_CHECKS[0], CPU, SMALL).sentence


def test_the_emulator_leaves_no_trace() -> None:
    before = loader.wrap_module
    run_check(GRAPH_CHECKS[0], CPU, SMALL)
    assert loader.wrap_module is before


# --- shapes


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("heads", "--model-shape heads is '', wanted a number, such as heads=8"),
        ("colour=3", "--model-shape has 'colour=3', wanted NAME=VALUE with a name of heads, kv_heads"),
        ("heads=eight", "--model-shape heads is 'eight', wanted a number"),
        ("heads=12", "--model-shape heads is 12, wanted a multiple of kv_heads, which is 8"),
        ("dtype=int8", "--model-shape dtype is int8, wanted bfloat16"),
        ("latent=129", "--model-shape latent is 129, wanted 0 to head_dim, which is 128"),
        ("width=65", "--model-shape width is 65, wanted 2 to 64"),
        ("steps=18,topk=4", "--model-shape steps is 18, wanted (steps - 1) * topk at most 64, and not 68"),
    ],
)
def test_a_wrong_shape_is_one_sentence(text: str, wanted: str) -> None:
    with pytest.raises(ModelShapeError) as caught:
        ModelShape.parse(text)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_a_shape_changes_what_it_names() -> None:
    assert ModelShape.parse(" kv-heads=4, heads=8 ") == ModelShape(heads=8, kv_heads=4)
    assert ModelShape.parse("") == ModelShape()
