"""The tables of heads/target_table.py agree with the sources of both engines."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_sources import Sources, find_package

from eagle_plugin.heads import target_table
from eagle_plugin.heads.files import HeadError

METHOD = "set_eagle3_layers_to_capture"
# Draft models and embedders that inherit the method from a target's class, and a wrapper around other frameworks.
NO_TARGETS = ("NextN", "MTP", "Eagle", "Eagle3", "AssistantForCausalLM", "EmbeddingGemmaModel", "MindSporeForCausalLM")
LAYERS = 48
SHALLOW = 8


def open_sources(name: str) -> Sources:
    root = find_package(name)
    if root is None:
        pytest.skip(f"{name} is installed neither here nor in .venv-{name}")
    return Sources(root)


@pytest.fixture(scope="module")
def sglang_methods() -> dict[str, ast.FunctionDef]:
    """Target architecture -> the method that its class has or inherits."""
    sources = open_sources("sglang")
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted((sources.root / "srt/models").rglob("*.py")):
        entry = sources.module(path).assigned.get("EntryClass")
        names = [] if entry is None else entry.elts if isinstance(entry, ast.List | ast.Tuple) else [entry]
        for name in (node.id for node in names if isinstance(node, ast.Name)):
            bodies = [node for kind in sources.family(path, name) for node in kind.body]
            methods = [node for node in bodies if isinstance(node, ast.FunctionDef) and node.name == METHOD]
            if methods and not name.endswith(NO_TARGETS):
                found[name] = methods[0]
    return found


class Recorder(SimpleNamespace):
    """A model of which only the layer count is real: every other attribute is another recorder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Recorder(is_last_rank=True, num_hidden_layers=self.num_hidden_layers)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any) -> Recorder:
        if arguments:
            self.passed_on = arguments[0]
        return self

    def __len__(self) -> int:
        return self.num_hidden_layers

    def __getitem__(self, layer: int) -> Recorder:
        return self.layer

    def find(self, name: str) -> list[Any]:
        values = [vars(self)[name]] if name in vars(self) else []
        inner = [child for child in vars(self).values() if isinstance(child, Recorder)]
        return values + [value for child in inner for value in child.find(name)]


def capture(method: ast.FunctionDef, ids: list[int] | None, layers: int) -> tuple[int, ...] | None:
    """Run the engine's method on `ids`: the layers that it captures, None when an inner model does it."""
    model = Recorder(is_last_rank=True, num_hidden_layers=layers)
    used = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {name: model.outside for name in used if not hasattr(builtins, name)}
    exec(compile(ast.Module([method], []), METHOD, "exec"), names)
    names[METHOD](model, ids)
    (captured,) = model.find("layers_to_capture") or model.find("passed_on")
    return None if captured is ids else tuple(captured)


def test_sglangs_targets(sglang_methods: dict[str, ast.FunctionDef]) -> None:
    assert set(target_table.SGLANG_TARGETS) == set(sglang_methods)


def test_sglangs_ids(sglang_methods: dict[str, ast.FunctionDef]) -> None:
    """What we write for some layers makes each class capture them, and what we read is what it captures."""
    ran = 0
    for architecture, method in sglang_methods.items():
        for ids in (None, [1, 20, 40], [2, 24, 45], [0, 23, 46], [2, 24, LAYERS]):
            captured = capture(method, ids, LAYERS)
            if captured is not None:
                ran += 1
                assert captured == target_table.sglang_layers(architecture, ids, LAYERS), (architecture, ids)
        for wanted in ((2, 24, 45), (1, 20, 40), (3, 25, 46), (0, 24, 45)):
            try:
                captured = capture(method, target_table.sglang_ids(architecture, wanted, LAYERS), LAYERS)
            except HeadError:
                assert target_table.SGLANG_TARGETS[architecture] == "first_is_one" and wanted[0] == 1, architecture
                continue
            assert captured in (None, wanted), architecture
    assert ran > 200


# Of SGLang's files, those in which the output of the last layer is captured, and their targets for EAGLE heads.
LAST = {
    "gemma3_causal.py": {"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"},
    "gemma4_causal.py": {
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
    },
    "gpt_oss.py": {"GptOssForCausalLM"},
    "minimax_m3.py": {"MiniMaxM3SparseForCausalLM"},
    **dict.fromkeys(("laguna.py", "lfm2.py", "lfm2_moe.py", "mimo_v2.py", "nemotron_h.py"), set()),
}
BOUNDARY = re.compile(r"(end_layer|num_layers|num_hidden_layers|len\(self\.layers\)) in self\.layers_to_capture")


def test_sglangs_classes_that_capture_the_last_layer() -> None:
    models = open_sources("sglang").root / "srt/models"
    found = {path.name for path in models.glob("*.py") if BOUNDARY.search(path.read_text("utf-8"))}
    assert found == set(LAST)
    assert set().union(*LAST.values()) == target_table.SGLANG_LAST <= set(target_table.SGLANG_TARGETS)
    for file, names in LAST.items():  # a wrapper has its language model from the file
        for name in names:
            own = [path for path in models.glob("*.py") if f"class {name}(" in path.read_text("utf-8")]
            assert any(file == path.name or file[:-3] in path.read_text("utf-8") for path in own), name


def test_sglangs_rules_differ(sglang_methods: dict[str, ast.FunctionDef]) -> None:
    """The exceptions are real: the rule of most classes gives other layers there."""
    others = {name for name, rule in target_table.SGLANG_TARGETS.items() if rule != "output"}
    for architecture in others - {"KimiK25ForConditionalGeneration"}:  # passes on to DeepSeek's
        found = [capture(sglang_methods[architecture], ids, LAYERS) for ids in (None, [2, 24, 45], [2, 24, LAYERS])]
        assert found != [(2, 24, 45), (3, 25, 46), (3, 25, LAYERS + 1)], architecture


def test_vllms_targets() -> None:
    """vLLM's own classes with SupportsEagle3; what it serves through transformers' classes is in no table."""
    sources = open_sources("vllm")
    registry = sources.module(sources.root / "model_executor/models/registry.py")
    found = set()
    for table in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
        entries = registry.assigned[table]
        assert isinstance(entries, ast.Dict) and len(entries.keys) > 100
        for key, value in zip(entries.keys, entries.values, strict=True):
            assert isinstance(key, ast.Constant)
            module, name = ast.literal_eval(value)
            path = sources.locate(module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}")
            assert path is not None, module
            if any(kind.name == "SupportsEagle3" for kind in sources.family(path, name)):
                found.add(key.value)
    assert found == target_table.VLLM_TARGETS


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    """The scan follows base classes over files, and the run of a method sees the id convention."""
    package = tmp_path / "engine"
    package.mkdir()
    (package / "base.py").write_text("class SupportsEagle3:\n    pass\nclass Middle(SupportsEagle3):\n    pass\n")
    (package / "model.py").write_text(
        "from .base import Middle\nclass Target(Middle):\n    pass\nclass Plain:\n    pass\n"
    )
    sources = Sources(package)
    family = [kind.name for kind in sources.family(package / "model.py", "Target")]
    assert family == ["Target", "Middle", "SupportsEagle3"]
    assert [kind.name for kind in sources.family(package / "model.py", "Plain")] == ["Plain"]
    code = f"""
    def {METHOD}(self, layer_ids=None):
        self.model.layers_to_capture = list(layer_ids)
    """
    (method,) = ast.parse(textwrap.dedent(code)).body
    assert isinstance(method, ast.FunctionDef)
    assert capture(method, [1, 3, 5], SHALLOW) != target_table.sglang_layers("LlamaForCausalLM", [1, 3, 5], SHALLOW)
