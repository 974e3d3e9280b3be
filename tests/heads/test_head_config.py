"""A head's files are read once, and nonsense in them is one sentence: types, ranges, and what is no plain file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from head_edits import Edit, config
from safetensors.torch import load_file, save_file

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.interpretations import read_interpretations
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.same_form import check_same_form


def bom(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")


def loop(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def pipe(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def second_shard(factor: float) -> Edit:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file({"norm.weight": factor * weights["norm.weight"]}, folder / "other.safetensors")

    return edit


def rope(**options: object) -> Edit:
    return config(rope_scaling=options)


NONSENSE: dict[str, tuple[Edit, list[str]]] = {
    "dtype": (config(dtype="banana"), ["dtype 'banana'", "bfloat16"]),
    "torch_dtype": (config(torch_dtype=16), ["torch_dtype 16", "bfloat16"]),
    "rope base null": (config(rope_theta=None, rope_parameters=None), ["rope_theta None", "above 0"]),
    "rope base a text": (config(rope_theta="1e4"), ["rope_theta '1e4'", "a number above 0"]),
    "rope base infinite": (config(rope_parameters={"rope_theta": float("inf")}), ["rope_parameters.rope_theta inf"]),
    "rope type": (rope(rope_type="corkscrew"), ["rope_scaling.rope_type 'corkscrew'", "llama3"]),
    "old name of the rope type": (rope(type="corkscrew"), ["rope_scaling.rope_type 'corkscrew'"]),
    "rope factor": (rope(rope_type="linear", factor="two"), ["rope_scaling.factor 'two'", "above 0"]),
    "rope without its factor": (rope(rope_type="yarn"), ["rope_scaling.factor None", "yarn"]),
    "rope a list": (config(rope_scaling=[1]), ["rope_scaling [1]", "an object or null"]),
    "eps": (config(rms_norm_eps="small"), ["rms_norm_eps 'small'", "1e-05"]),
    "eps of a unit": (config(rms_norm_eps=1.5), ["rms_norm_eps 1.5", "from 0 to 1"]),
    "layers": (config(num_hidden_layers=10**9), ["num_hidden_layers 1000000000", "from 1 to 1000"]),
    "a size that is true": (config(head_dim=True), ["head_dim True", "whole number"]),
    "a negative size": (config(draft_vocab_size=-5), ["draft_vocab_size -5", "whole number"]),
    "a switch that is a text": (config(tie_word_embeddings="no"), ["tie_word_embeddings 'no'", "true or false"]),
    "eagle_config": (config(eagle_config=[1, 3, 5]), ["eagle_config [1, 3, 5]", "an object"]),
    "quantization_config": (config(quantization_config="fp8"), ["quantization_config 'fp8'", "an object or null"]),
    "byte order mark": (bom, ["config.json", "byte order mark", "UTF-8"]),
    "a loop of links": (loop, ["config.json", "leads back to itself", "wanted a file"]),
    "a pipe of weights": (pipe("model.safetensors"), ["model.safetensors is a pipe", "wanted a file"]),
    "a pipe of keys": (pipe("config.json"), ["config.json is a pipe", "wanted a file"]),
    "a pipe of shards": (pipe("model.safetensors.index.json"), ["index.json is a pipe"]),
    "two values of a tensor": (second_shard(2.0), ["norm.weight in model.safetensors", "in other.safetensors"]),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_one_sentence_for_every_reader(
    case: str, tiny_eagle3: Path, tiny_target: Path, tmp_path: Path
) -> None:
    edit, phrases = NONSENSE[case]
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    edit(folder)
    readers = (
        lambda: check_head(tiny_target, folder, algorithm="EAGLE3"),
        lambda: load_any_head(folder, tiny_target),
        lambda: read_interpretations(folder, tiny_target),
        lambda: check_same_form(tiny_eagle3, folder),
    )
    for read in readers:
        with pytest.raises(HeadError) as refused:
            read()
        message = str(refused.value)
        for phrase in phrases:
            assert phrase in message
        assert str(folder) in message and "\n" not in message and not message.endswith(".")


def test_a_folder_that_is_a_loop(tmp_path: Path) -> None:
    (tmp_path / "head").symlink_to("head")
    with pytest.raises(HeadError, match="head is a symbolic link that leads back to itself, wanted a folder"):
        read_head(tmp_path / "head")


def test_what_engines_read_is_let_through(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    """The negative control: unusual values that no engine minds."""
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    second_shard(1.0)(folder)  # the same values twice
    base = json.loads((folder / "config.json").read_text()).get("rope_theta", 10000.0)
    scaled = {"rope_theta": base, "rope_type": "linear", "factor": 1}
    config(rope_theta=None, rope_scaling=None, rope_parameters=scaled, dtype="half", layer_types=None)(folder)
    config(rms_norm_eps=1e-6, sliding_window=None, quantization_config=None, unknown={"a": [1]})(folder)
    assert check_head(tiny_target, folder, algorithm="EAGLE3").num_layers == 1
    assert load_any_head(folder, tiny_target).kind == "eagle3"


def test_a_description_has_both_conventions(tiny_eagle3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    key = "eagle_aux_hidden_state_layer_ids"
    config(**{key: [2, 4, 6]}, eagle_config={key: [1, 3, 5]})(folder)
    head = read_head(folder)
    assert head.aux_ids == ([1, 3, 5], [2, 4, 6]) and head.hidden_size_key == "target_hidden_size"
    assert (head.num_layers, head.quantised, head.leftover_quantisation) == (1, [], False)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"fc.weight": weights["fc.weight"].to(torch.int8)}, folder / "model.safetensors")
    config(quantization_config={"quant_method": "fp8"})(folder)
    head = read_head(folder)
    assert head.quantised == ["fc.weight"] and not head.leftover_quantisation
