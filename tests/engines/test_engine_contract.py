"""The tables of names that the adapters touch are complete, and the installed engines have them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import VLLM_PYTHON

from eagle_plugin.runtime.engine_contract import Difference, differences, wanted_names
from eagle_plugin.runtime.engine_source import EngineSource

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("sglang", "vllm")
# The environments of the other tested releases, where they were made.
OTHERS = {"sglang": ROOT / ".venv-sglang-before", "vllm": ROOT / ".venv-vllm-next"}


@cache
def source_of(engine: str) -> EngineSource:
    if engine == "sglang":
        return EngineSource.installed("sglang")
    if not VLLM_PYTHON.exists():
        pytest.skip("there is no .venv-vllm; make it with `make env-vllm`")
    return packages_of(VLLM_PYTHON.parents[1], engine)


def packages_of(environment: Path, engine: str) -> EngineSource:
    (folder,) = environment.glob("lib/python*/site-packages")
    return EngineSource(folder, engine)


@cache
def wanted_of(engine: str) -> dict[str, str]:
    contract = importlib.import_module(f"eagle_plugin.{engine}.engine_contract").CONTRACT
    return wanted_names(engine, ROOT / "eagle_plugin" / engine, contract)


class Subclass(NamedTuple):
    """A class of an adapter below one of the engine's."""

    name: str
    base: str  # its place in the engine
    methods: set[str]
    read: set[str]  # attributes of self that it has from elsewhere


def subclasses(engine: str) -> Iterator[Subclass]:
    for file in sorted((ROOT / "eagle_plugin" / engine).glob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{engine}.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in (b.value if isinstance(b, ast.Subscript) else b for b in node.bases):
                root, _, rest = ast.unparse(base).partition(".")
                if root in imported:
                    place = imported[root] + (f".{rest}" if rest else "")
                    methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                    own = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
                    stored = {n.attr for n in own if isinstance(n.ctx, ast.Store)}
                    yield Subclass(node.name, place, methods, {n.attr for n in own} - stored - methods)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_subclasses_replace_and_read_is_in_the_table(engine: str) -> None:
    source, wanted = source_of(engine), wanted_of(engine)
    found = list(subclasses(engine))
    assert {one.name for one in found} >= {"sglang": {"TreeWorker", "TreeDrafter"}, "vllm": {"TreeProposer"}}[engine]
    missing = [
        f"{one.base}.{name}"
        for one in found
        for name in sorted(one.methods | one.read)
        if source.find(f"{one.base}.{name}") is not None and f"{one.base}.{name}" not in wanted
    ]
    assert missing == []


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tested_release_has_every_name(engine: str) -> None:
    wanted = wanted_of(engine)
    assert len(wanted) > 150 and sum(map(bool, wanted.values())) > 15
    assert differences(source_of(engine), wanted) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_the_other_tested_release_has_every_name(engine: str) -> None:
    if not OTHERS[engine].exists():
        pytest.skip(f"there is no {OTHERS[engine].name}; `make test-matrix` makes it")
    assert differences(packages_of(OTHERS[engine], engine), wanted_of(engine)) == []


RUNNER, PROPOSER = "v1/worker/gpu_model_runner.py", "v1/spec_decode/llm_base_proposer.py"
WORKER, RESULT = "srt/speculative/eagle_worker_v2.py", "srt/managers/utils.py"
LOAD = "def load_model(self,"
FEWER = "EagleProposer.load_model takes (self, more, target_model), wanted (self, target_model)"


@pytest.mark.parametrize(
    ("engine", "file", "old", "new", "place"),
    [
        ("vllm", RUNNER, "def _sample(", "def _draw(", "GPUModelRunner._sample is gone"),
        ("vllm", PROPOSER, LOAD, f"{LOAD} more,", FEWER),
        ("sglang", WORKER, "def _capture_cuda_graphs(", "def _capture(", "_capture_cuda_graphs is gone"),
        ("sglang", RESULT, "new_seq_lens:", "next_seq_lens:", "GenerationBatchResult.new_seq_lens is gone"),
    ],
)
def test_a_changed_name_is_found(
    engine: str, file: str, old: str, new: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of.__wrapped__(engine)  # which has read no file yet
    changed = source.folder / engine / file
    read = Path.read_text

    def text(path: Path, *args: str) -> str:
        found = read(path, *args)
        assert path != changed or old in found
        return found.replace(old, new) if path == changed else found

    monkeypatch.setattr(Path, "read_text", text)
    found = differences(source, wanted_of(engine))
    assert [str(one) for one in found if str(one).endswith(place)], found
    assert all(isinstance(one, Difference) for one in found) and len(found) < 4
