"""Quantised targets are read with their scales, or refused by the name of their format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import quantise
from safetensors.torch import load_file
from tiny_targets import write_target

from eagle_plugin.common.devices import DeviceError
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store import features
from eagle_plugin.learning.data.store.features import load_target

NAME = "model.layers.3.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("plain"), vocab_size=128)


@pytest.mark.parametrize("name", ["w8a8-int8", "w8a8-fp8", "w4a16"])
def test_compressed_tensors_are_read_with_their_scales(name: str, plain: Path, tmp_path: Path) -> None:
    model: Any = load_target(quantise(tmp_path / name, plain, name), torch.float32)
    with torch.no_grad():
        model(torch.tensor([[5, 6]]))  # the first forward unpacks the weights
    weight = model.model.layers[3].mlp.up_proj.weight
    before = load_file(plain / "model.safetensors")[NAME]
    difference = (weight - before).norm() / before.norm()
    assert 0 < difference < {"w4a16": 0.15}.get(name, 0.04), "of the codes alone it is far above 1"


def test_weights_that_transformers_would_read_without_their_scales(plain: Path, tmp_path: Path) -> None:
    """Model-Optimizer's FP8: transformers leaves the scales out and goes on."""
    target = quantise(tmp_path / "target", plain, "modelopt-fp8")
    with pytest.raises(DataError, match=r"target has weights that are quantised by modelopt, .* one of these formats$"):
        load_target(target)
    config = json.loads((target / "config.json").read_text())
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": config.pop("quantization_config")}))
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="quantised by modelopt"):
        load_target(target)


@pytest.mark.parametrize("name", ["fp8-block", "gptq", "awq"])
def test_what_transformers_needs_more_packages_for(name: str, plain: Path, tmp_path: Path) -> None:
    method = name.removesuffix("-block")
    with pytest.raises(
        DataError, match=rf"requires .*\); install what it asks for to read {method} weights, or let an engine"
    ):
        load_target(quantise(tmp_path / name, plain, name))


def test_a_gpu_that_a_target_does_not_fit(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights go to the GPU as they are read, where transformers can do that."""
    asked: list[dict[str, Any]] = []

    class Full:
        @staticmethod
        def from_pretrained(folder: Path, **options: Any) -> None:
            asked.append(options)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(features, "auto_class", lambda config: Full)
    for has_accelerate, placed in ((True, {"": torch.device("cuda:1")}), (False, None)):
        monkeypatch.setattr("transformers.utils.is_accelerate_available", lambda found=has_accelerate: found)
        with pytest.raises(DeviceError, match=r"the memory of cuda:1 ran out .*, or let an engine .*`data collect`$"):
            load_target(plain, device="cuda:1")
        assert asked.pop().get("device_map") == placed
    with pytest.raises(DeviceError):
        load_target(plain)
    assert "device_map" not in asked.pop()


def test_a_quantised_output_layer_is_not_taken_for_a_tied_one(plain: Path, tmp_path: Path) -> None:
    target = quantise(tmp_path / "target", plain, "gptq", output=True)
    with pytest.raises(HeadError, match=r"has lm_head\.\w+, wanted lm_head.weight; give the target with an unquantis"):
        TargetFiles(target).lm_head()
    kept = TargetFiles(quantise(tmp_path / "kept", plain, "gptq")).lm_head()
    assert torch.equal(kept, load_file(plain / "model.safetensors")["lm_head.weight"])
