"""Our head modules compute what SGLang's own head classes compute, for every naming the checkpoint reader accepts."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference_decoder import served_head
from safetensors.torch import load_file, save_file
from server_forks import run_forked
from torch import Tensor
from trained_heads import rewrite, run, trained_head

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.new_config import ROPE_KEYS

EMBEDDING = "model.embed_tokens.weight"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]


DRAFT_IDS = torch.arange(10, 138)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPORTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the head, keys of the target's config.json
    "eagle2": ({"kind": "eagle2"}, {}),
    "eagle3 3.0": ({"kind": "eagle3", "norms": "3.0", "draft_ids": DRAFT_IDS}, {}),
    "eagle3 3.1, whole vocabulary": ({"kind": "eagle3"}, {}),
    "eagle3 before fc, aux layers": ({"kind": "eagle3", "norms": "before_fc", "aux_layers": (1, 4, 6)}, {}),
    "eagle3 before fc, normed output": ({"kind": "eagle3", "norms": "before_fc_output", "draft_ids": DRAFT_IDS}, {}),
    "eagle3 two layers": (
        {"kind": "eagle3", "layers": 2, "draft_ids": DRAFT_IDS, "num_heads": 8, "num_kv_heads": 1},
        {},
    ),
    "peagle": ({"kind": "peagle", "layers": 2, "mask_token_id": 3}, {}),
    "peagle 3.0": ({"kind": "peagle", "mask_token_id": 511, "norms": "3.0", "draft_ids": DRAFT_IDS}, {}),
    "peagle before fc": ({"kind": "peagle", "layers": 4, "mask_token_id": 0, "norms": "before_fc"}, {}),
    # Heads are made with plain positions for it: the engines differ.
    "eagle3 for dynamic positions": ({"kind": "eagle3"}, {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}),
    "eagle3 linear": ({"kind": "eagle3"}, {"rope_parameters": LINEAR}),
    "eagle3 yarn": ({"kind": "eagle3"}, {"rope_parameters": YARN}),
    "eagle3 llama3": ({"kind": "eagle3"}, {"rope_parameters": LLAMA3}),
}
# A head, what a careless exporter would do to its config.json, and a tensor that it would forget.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no fc bias": ("eagle2", {}, "fc.bias"),
    "no norm_output": ("eagle3 3.1, whole vocabulary", {"norm_output": False}, ""),
    "vLLM's norm only": ("eagle3 two layers", {}, "layers.1.hidden_norm.weight"),
}


def legacy_variant(source: Path, folder: Path) -> Path:
    """The same head in the names of SpecForge: a model. prefix, one norm per aux state, and normed states."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"use_aux_norm": True, "norm_output": True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer", "model.midlayer"): tensor for name, tensor in weights.items()}
    renamed |= {f"aux_norm_{level}.weight": torch.rand(64) + 0.5 for level in ("low", "mid", "high")}
    save_file(renamed, folder / "model.safetensors")
    return folder


class Engine(NamedTuple):
    """The outputs of SGLang's classes by the name of the head, and their inputs."""

    inputs: dict[str, Tensor]
    results: dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def heads(
    tiny_target: Path,
    tiny_eagle2: Path,
    tiny_eagle3: Path,
    tiny_eagle3_reduced: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, DraftHead]]:
    """Checkpoints and what the engine should compute with them."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    found: dict[str, tuple[Path, DraftHead]] = {
        "written eagle2": (tiny_eagle2, served_head(tiny_target, tiny_eagle2, "EAGLE"))
    }
    legacy = legacy_variant(tiny_eagle3, folder / "legacy")
    for name, path in {"eagle3": tiny_eagle3, "reduced": tiny_eagle3_reduced, "legacy": legacy}.items():
        found[f"written {name}"] = path, served_head(tiny_target, path)
    for name, (options, keys) in EXPORTED.items():
        target = rewrite(tiny_target, folder / f"target of {name}", lambda c, k=keys: c | k) if keys else tiny_target
        head = trained_head(target=target, **options)
        save_head(head, folder / name, target_dir=target, dtype=torch.float32)
        found[name] = folder / name, head
    for name, (source, keys, missing) in WRONG.items():
        weights = lambda w, m=missing: {key: tensor for key, tensor in w.items() if key != m}  # noqa: E731
        found[name] = rewrite(folder / source, folder / name, lambda c, k=keys: c | k, weights), found[source][1]
    return found


@pytest.fixture(scope="module")
def engine(
    heads: dict[str, tuple[Path, DraftHead]], tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    folder, n = tmp_path_factory.mktemp("engine"), 9
    inputs = {
        "tokens": torch.randint(512, (n,)),
        "positions": torch.arange(40, 40 + n),
        "EAGLE": torch.randn(n, 64),
        "EAGLE3": torch.randn(n, 192),
    }
    save_file(inputs, folder / "inputs.safetensors")
    script, log = Path(__file__).parents[1] / "support/engine_heads.py", folder / "log"
    arguments = [str(tiny_target), str(folder), *(f"{head.spec.algorithm}={path}" for path, head in heads.values())]
    assert run_forked(script, arguments, log) == 0, log.read_text()[-3000:]
    return Engine(inputs, {name: load_file(folder / f"{i}.safetensors") for i, name in enumerate(heads)})


def assert_equal(head: DraftHead, name: str, engine: Engine) -> None:
    inputs, theirs = engine.inputs, engine.results[name]
    state, logits = run(head, inputs["tokens"], inputs[head.spec.algorithm], inputs["positions"])
    torch.testing.assert_close(state, theirs["state"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, theirs["logits"], rtol=1e-4, atol=1e-4)
    if "target_ids" in theirs:
        assert torch.equal(head.to_target(torch.arange(logits.shape[1])), theirs["target_ids"])


def test_equal_to_the_engines_classes(heads: dict[str, tuple[Path, DraftHead]], engine: Engine) -> None:
    """Hand-written checkpoints, and those that save_head writes for what was trained."""
    for name, (_, head) in heads.items():
        if name not in WRONG:
            assert_equal(head, name, engine)
    rotations = {(head.config.rope_parameters or {})["rope_type"] for _, head in heads.values()}
    assert rotations == {"default", *ROPE_KEYS}
    assert "target_ids" in engine.results["written reduced"] and "target_ids" in engine.results["eagle3 3.0"]


def test_the_mask_of_a_parallel_head(heads: dict[str, tuple[Path, DraftHead]], engine: Engine) -> None:
    """Our class for SGLang keeps it, through the norms and fc of real features, and finds none in other heads."""
    masked = {name for name, results in engine.results.items() if "mask state" in results}
    assert masked == {"peagle", "peagle 3.0", "peagle before fc"}
    for name in masked:
        head, results = heads[name][1], engine.results[name]
        torch.testing.assert_close(results["mask state"], head.mask_state().detach(), rtol=1e-4, atol=1e-5)
        assert int(results["mask token"]) == head.mask_token_id
        with torch.no_grad():
            head.get_parameter("mask_hidden").mul_(-2)
            torch.testing.assert_close(results["new mask state"], head.mask_state(), rtol=1e-4, atol=1e-5)
            head.get_parameter("mask_hidden").div_(-2)
    assert not torch.allclose(engine.results["peagle"]["mask state"], torch.zeros(1, 64), atol=0.1)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_shows(name: str, heads: dict[str, tuple[Path, DraftHead]], engine: Engine) -> None:
    """The engine loads these without a message and computes something else."""
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(heads[name][1], name, engine)
