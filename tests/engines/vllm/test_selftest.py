"""The self-test of a server on vLLM: a healthy round passes, planted faults are named, and who serves afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from large_tensors import LargeTensors
from log_lines import Lines
from torch import Tensor
from vllm_configs import configure
from vllm_engines import engine, runner

from eagle_plugin.common.errors import UserError
from eagle_plugin.kernels import loader
from eagle_plugin.runtime.accept import KVCaches
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.ranks import RankMissing
from eagle_plugin.selftest import record
from eagle_plugin.selftest.failure import LeftOut
from eagle_plugin.selftest.shapes import ModelShape, as_text
from eagle_plugin.selftest.subject import Subject, round_key
from eagle_plugin.vllm import attention, plugin_config, ranks, selftest, support, unsupported
from eagle_plugin.vllm import worker as worker_module
from eagle_plugin.vllm.graph_test import GraphTest
from eagle_plugin.vllm.round_test import RoundTest
from eagle_plugin.vllm.selftest import SelfTestFailed
from eagle_plugin.vllm.worker import TreeWorker

TREES = {"depth": 3, "topk": 2, "nodes": 8}


@pytest.fixture(scope="module")
def served_runner(target: Path, head: Path) -> Iterator[Any]:
    with engine(target, head, **TREES) as llm:  # type: ignore[arg-type]
        yield runner(llm)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the plugin logs in a server that tests itself, with records of its own."""
    kernels = loader.cache_dir()
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels.resolve())
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EAGLE_SELFTEST", "1")
    monkeypatch.setattr(support, "_logged", set())
    logger, handler = logging.getLogger("vllm.eagle_plugin"), Lines()
    before = logger.level
    logger.setLevel(logging.INFO)  # unlike the attribute, it forgets what was found to be off
    logger.addHandler(handler)
    yield handler.logged
    logger.removeHandler(handler)
    logger.setLevel(before)


def skew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of trees see wrong ancestors."""
    healthy = attention.tree_attention

    def skewed(*arguments: Any, **options: Any) -> Tensor:
        *others, ancestors = arguments
        return healthy(*others, ancestors << 1 | 1 if ancestors.shape[1] > 1 else ancestors, **options)

    monkeypatch.setattr(attention, "tree_attention", skewed)


def forget_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted keys and values stay where the nodes were."""
    monkeypatch.setattr(KVCaches, "move_accepted", lambda *_: None)


def shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a tree are at the position of its root."""
    tree = RoundTest._tree

    def shifted(self: RoundTest, drafted: Any, prefix: int) -> Tensor:
        return tree(self, drafted._replace(depths=torch.zeros_like(drafted.depths)), prefix)

    monkeypatch.setattr(RoundTest, "_tree", shifted)


def test_a_healthy_round_passes_again_and_again(served_runner: Any) -> None:
    assert RoundTest(served_runner).run() == [] == RoundTest(served_runner).run()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (skew, "a tree in one forward of the target"),
        (shift, "a tree in one forward of the target"),
        (forget_to_move, "a token after an accepted path"),
    ],
)
def test_planted_faults_are_named(fault: Any, what: str, served_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    reason = RoundTest(served_runner).run()[0]
    assert reason.startswith(f"{what}: the logits of ")
    assert "nodes differ from those of their paths token by token, by " in reason


FP8 = torch.float8_e4m3fn
OFF = 2**-10  # relative, of an input: products of another size are off by about as much in 16 bits


def rounds_inputs(layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """To 8 bits with a scale per row, after what differs from forward to forward."""
    values = inputs[0] * (1 + OFF * torch.randn_like(inputs[0]))
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-9) / torch.finfo(FP8).max
    return (values / scale).to(FP8).to(values.dtype) * scale, *inputs[1:]


def test_a_target_that_rounds_its_inputs_may_differ_more(served_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little difference moves 8-bit values by whole steps; a wrong mask is still found."""
    torch.manual_seed(2026)
    layers = [layer for name, layer in served_runner.get_model().named_modules() if name.endswith("_proj")]
    hooks = [layer.register_forward_pre_hook(rounds_inputs) for layer in layers]
    try:
        for name in (None, "awq"):  # the control
            monkeypatch.setattr(served_runner.model_config, "quantization", name)
            assert RoundTest(served_runner).run()
        monkeypatch.setattr(served_runner.model_config, "quantization", "modelopt")
        assert RoundTest(served_runner).run() == []
        skew(monkeypatch)
        assert RoundTest(served_runner).run()[0].startswith("a tree in one forward of the target: ")
    finally:
        for hook in hooks:
            hook.remove()


def test_a_prompt_that_sees_too_little_is_found(served_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where prompts are attended to as chains: only rows of prompts of several tokens are wrong."""
    healthy = attention.extend_attention

    def late(*arguments: Any, **options: Any) -> Tensor:
        rows = len(arguments[0])
        return healthy(*arguments, **(options | ({"window": 1} if rows > 8 else {})))

    monkeypatch.setattr(attention, "extend_attention", late)
    reasons = RoundTest(served_runner).run()
    assert reasons[0].startswith("a prompt in one forward of the target: the logits of ")


def test_a_small_cache_is_enough(served_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter prompt and fewer requests; without any block beside the one that vLLM keeps there is no test."""
    monkeypatch.setattr(served_runner.kv_cache_config, "num_blocks", 2)
    assert RoundTest(served_runner).run() == []
    monkeypatch.setattr(served_runner.kv_cache_config, "num_blocks", 1)
    with pytest.raises(RuntimeError, match="the KV cache has no room for 1 requests of "):
        RoundTest(served_runner).run()


def test_a_server_tests_itself_once(target: Path, head: Path, lines: list[str]) -> None:
    for passes in (2, 0):  # the second start reads the records
        with engine(target, head, **TREES):  # type: ignore[arg-type]
            pass
        assert sum("the self-test of the " in line and " passed in " in line for line in lines) == passes
        lines.clear()
        support._logged.clear()
    assert sorted(path.name.split("-")[0] for path in record.folder().glob("*.json")) == ["kernels", "round"]


def test_graphs_of_sizes_that_no_start_has_tested_are_tested(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with little memory captures few sizes; the next one may have more."""
    tested: list[Any] = []
    monkeypatch.setattr(RoundTest, "__init__", lambda self, served: setattr(self, "_runner", served))
    monkeypatch.setattr(RoundTest, "run", lambda self: tested.append(self._runner._step) or [])
    monkeypatch.setattr(ranks, "gather_objects", lambda value: [value])
    few, many = (SimpleNamespace(widest=lambda found=found: found) for found in ([[64, 16]], [[1, 16], [64, 16]]))
    for step in (None, few, few, many, few, None):
        served: Any = SimpleNamespace(device="cpu", _step=step)
        selftest.check_rounds(served, SUBJECT, logging.getLogger("vllm.eagle_plugin"))
    assert tested == [None, few, many]


def test_after_a_failed_round_vllms_own_worker_serves(
    target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        skew(patch)
        sentence = "a tree in one forward .* start the server again, with .*/selftest kept: from now on .* vLLM's own "
        with pytest.raises(SelfTestFailed, match=sentence), engine(target, head, **TREES):  # type: ignore[arg-type]
            pass
    monkeypatch.setenv("EAGLE_POLICY", "fixed")  # as `engine` had it: the record is of a server with these shapes
    options = {"max_num_seqs": 8, "additional_config": {"eagle_plugin": {"depth": 3, "topk": 2}}}
    lines.clear()
    config = configure(target, head, **options)
    assert config.parallel_config.worker_cls == unsupported.ENGINE_WORKERS["cpu"]
    assert not plugin_config.is_served(config.speculative_config)
    (line,) = lines
    assert "eagle3 is served by vLLM's own worker: the self-test failed: a tree in one forward of the target: " in line
    assert line.endswith("after a repair run: eagle-plugin selftest --again")
    record.forget()
    assert plugin_config.is_served(configure(target, head, **options).speculative_config)


SUBJECT = Subject("cpu", 1, [32, 32], as_text(ModelShape()), {"layers": 2}, "vllm")


@pytest.mark.parametrize("part", ["capture_steps", "choose_by_costs"])
@pytest.mark.parametrize(
    ("subject", "is_writable", "wanted"),
    [
        (SUBJECT, True, "/selftest kept: from now on it is served by vLLM's own worker"),
        (SUBJECT, False, "start the server with EAGLE_PLUGIN=0: then it is served by vLLM's own worker"),
        (None, True, ""),
    ],
)
def test_what_raises_beside_the_test_is_kept_too(
    part: str,
    subject: Subject | None,
    is_writable: bool,
    wanted: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next start is vLLM's only if a record says so, and only servers that test themselves read records."""
    raised = {part: RuntimeError("an illegal memory access\nmore")}

    def step(name: str) -> None:
        if name in raised:
            raise raised[name]

    def start() -> None:
        steps = {name: partial(step, name) for name in ("capture_steps", "choose_by_costs")}
        config = SimpleNamespace(speculative_config=None)
        worker = SimpleNamespace(model_runner=SimpleNamespace(device=torch.device("cpu"), **steps), vllm_config=config)
        TreeWorker.begin_rounds(worker)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_module, "plugin_config", lambda config: SimpleNamespace(subject=subject))
    monkeypatch.setattr(worker_module, "check_rounds", lambda *arguments: None)
    monkeypatch.setattr(worker_module, "rank_logger", lambda logger: logger)
    if not is_writable:
        record.folder().parent.mkdir(parents=True, exist_ok=True)
        record.folder().write_text("a file")
    with pytest.raises(SelfTestFailed if subject else RuntimeError, match="an illegal memory access") as caught:
        start()
    found = record.read(round_key(SUBJECT, "cpu"))
    assert (found is not None) == (subject is not None and is_writable)
    assert str(caught.value).endswith(wanted)
    assert found is None or found.reasons == ["a first round failed: an illegal memory access"]
    for error in (torch.OutOfMemoryError("no memory"), UserError("correct it"), RankMissing("no other rank")):
        record.forget()
        raised[part] = error  # type: ignore[assignment]
        with pytest.raises(type(error)) as caught:
            start()
        assert caught.value is error and record.read(round_key(SUBJECT, "cpu")) is None


@pytest.fixture(scope="module")
def captured_runner(target: Path, head: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, recording_launches():
        patch.setenv("EAGLE_GRAPHS", "emulate")
        with engine(target, head, policy="random", **TREES) as llm:  # type: ignore[arg-type]
            yield runner(llm)


def test_graphs_are_compared(captured_runner: Any) -> None:
    test = GraphTest(captured_runner, RoundTest(captured_runner)._blocks_for, torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert test.run() == []
    assert test.longest > 1  # keys were moved
    trees = len(captured_runner._step.shapes) - 1
    assert trees > 3 and captured_runner._step.functions.replays >= 4 * 2 * 4 * trees


@pytest.mark.parametrize("phase", ["draft", "verify", "walk", "extend"])
def test_a_graph_that_does_something_else_is_named(
    phase: str, captured_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of four requests, and not the function, leaves a wrong value of the first one."""
    functions, name = captured_runner._step.functions, {"draft": "tree.tokens", "walk": "accepted.tokens"}.get(phase)
    run = functions.run

    def wrong(key: Any, function: Any) -> Any:
        result = run(key, function)
        if key[:2] == (phase, 4) == ("verify", 4):
            result[0][0] += 3
        elif key[:2] == (phase, 4):
            captured_runner._step._memory.view(name or "state.hidden", 1)[0] += 3
        return result

    monkeypatch.setattr(functions, "run", wrong)
    with torch.inference_mode():
        reasons = RoundTest(captured_runner).graphs_against_eager()
    assert reasons and all(
        reason.startswith("graphs of 4 requests, ") and f": {phase}: " in reason for reason in reasons
    )


def test_a_batch_without_memory_is_left_out(captured_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are tested, and it is no difference."""
    functions, tested = captured_runner._step.functions, set()
    run = functions.run

    def tight(key: Any, function: Any) -> Any:
        if key[:2] == ("extend", 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        tested.add(key[:2])
        return run(key, function)

    monkeypatch.setattr(functions, "run", tight)
    found = RoundTest(captured_runner).run()
    trees = len(captured_runner._step.shapes) - 1
    assert len(found) == 2 * trees and all(
        isinstance(x, LeftOut) and x.startswith("graphs of 4 requests, ") for x in found
    )
    assert {("extend", 1), ("extend", 2), ("extend", 8)} <= tested


@pytest.mark.parametrize("part", ["prompts_against_tokens", "trees_against_paths"])
def test_a_part_without_memory_is_left_out(part: str, served_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(test: RoundTest) -> list[str]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tight.__name__ = part
    monkeypatch.setattr(RoundTest, part, tight)
    (left_out,) = RoundTest(served_runner).run()
    assert isinstance(left_out, LeftOut) and left_out.startswith(part.replace("_", " "))


def test_no_tensor_is_as_large_as_the_logits(captured_runner: Any) -> None:
    """There may be no memory for one beside what was captured: it is filled where the walk reads it."""
    blocks_for = RoundTest(captured_runner)._blocks_for
    test = GraphTest(captured_runner, blocks_for, torch.Generator().manual_seed(1))
    vocabulary = captured_runner.model_config.get_vocab_size()
    with torch.inference_mode(), LargeTensors(8 * TREES["nodes"] * vocabulary * 4) as large:
        assert test.run() == []
    assert large.made == []
    with LargeTensors(8 * TREES["nodes"] * vocabulary * 4) as large:  # the control
        captured_runner._step._memory.logits(8).clone()
    assert large.made == ["aten::clone"]
