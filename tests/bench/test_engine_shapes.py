"""The trees of servers that the commands start, where the user gives none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.serving.configs import config_specs
from eagle_plugin.bench.spec import EngineName, ServerSpec
from eagle_plugin.bench.states.configs import state_specs
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.shapes import CPU_SHAPE, GPU_SHAPE

PLAIN = ServerSpec(target=Path("target"), mode="plain", head=Path("head"))


@pytest.mark.parametrize(
    ("engine", "device", "shapes"),
    [
        ("sglang", "cpu", {"plugin": CPU_SHAPE, "builtin_chain": Shape.chain(2), "builtin_tree": CPU_SHAPE}),
        ("sglang", "cuda", {"plugin": GPU_SHAPE, "builtin_chain": Shape.chain(3), "builtin_tree": Shape(5, 4, 8)}),
        ("vllm", "cpu", {"plugin": Shape(2, 4, 6), "builtin_chain": Shape.chain(2)}),
        ("vllm", "cuda", {"plugin": GPU_SHAPE, "builtin_chain": Shape.chain(3)}),
    ],
)
def test_on_a_gpu_both_sides_have_the_trees_of_gpus(engine: EngineName, device: str, shapes: dict[str, Shape]) -> None:
    """Not those of a CPU on either side."""
    plain = replace(PLAIN, engine=engine, device=device)
    specs = config_specs(plain, ("builtin_chain", "builtin_tree", "plugin"))
    assert {name: spec.shape for name, spec in specs.items()} == shapes
    assert state_specs(plain, Path("head"), None, "plugin")["trained"].shape == shapes["plugin"]
    own = state_specs(plain, Path("head"), None, "builtin")["trained"].shape
    assert own == ENGINES[engine].own_shape(device) == shapes["builtin_tree" if own.topk > 1 else "builtin_chain"]


def test_llama_has_the_tree_that_sglang_chooses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    sglang, vllm = ENGINES["sglang"], ENGINES["vllm"]
    assert sglang.own_shape("cuda", tmp_path) == sglang.plugin_shape(None, "cuda", tmp_path) == Shape(5, 4, 8)
    assert vllm.own_shape("cuda", tmp_path) == Shape.chain(3)
    assert vllm.plugin_shape(None, "cuda", tmp_path) == GPU_SHAPE


def test_all_levels_at_once_are_as_deep_as_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_plugin.bench.engine.parallel_levels", lambda head: 5)
    assert ENGINES["sglang"].plugin_shape(tmp_path, "cuda") == Shape(5, 4, 8)
