"""check_head: every head that the engine could not serve is refused in one sentence, every good one is described."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_plugin.heads.checkpoint import HeadError, HeadInfo, check_head, read_config

SHIPPED = Path(__file__).parents[2] / "examples" / "heads" / "smollm2-135m-instruct-eagle3"
ALGORITHMS = {"tiny_eagle2": "EAGLE", "tiny_eagle3": "EAGLE3", "tiny_eagle3_reduced": "EAGLE3"}
Edit = Callable[[Path], None]


def config(**values: Any) -> Edit:
    """Change keys of config.json; ... removes one."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        kept = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in kept.items() if v is not ...}))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Change the dict of tensors in place."""

    def edit(folder: Path) -> None:
        loaded = load_file(folder / "model.safetensors")
        change(loaded)
        save_file(loaded, folder / "model.safetensors")

    return edit


def drop(*names: str) -> Edit:
    return tensors(lambda t: [t.pop(name) for name in names])


def put(name: str, value: torch.Tensor) -> Edit:
    return tensors(lambda t: t.update({name: value}))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def shards(folder: Path) -> None:
    """Split model.safetensors into two files with an index."""
    loaded = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(loaded)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: loaded[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def lost_shard(folder: Path) -> None:
    shards(folder)
    (folder / "model-2.safetensors").unlink()


def d2t(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return tensors(lambda t: t.update(d2t=change(t["d2t"])))


def prefixed(t: dict[str, torch.Tensor]) -> None:
    renamed = {f"model.{name}": t[name] for name in t}
    t.clear()
    t.update(renamed)


def set_d2t(index: int, value: int) -> Edit:
    def change(table: torch.Tensor) -> torch.Tensor:
        table = table.clone()
        table[index] = value
        return table

    return d2t(change)


NAN = torch.tensor([float("nan")] * 2 + [0.0] * 126)
AUX = "eagle_aux_hidden_state_layer_ids"
REFUSALS: dict[str, tuple[str, Edit, list[str]]] = {
    # files
    "no folder": ("tiny_eagle3", shutil.rmtree, ["is not a folder", "config.json"]),
    "no config": ("tiny_eagle3", lambda p: (p / "config.json").unlink(), ["has no config.json"]),
    "config not json": ("tiny_eagle3", lambda p: (p / "config.json").write_text("{"), ["is not JSON"]),
    "config a list": ("tiny_eagle3", lambda p: (p / "config.json").write_text("[]"), ["JSON list", "object"]),
    "no weights": ("tiny_eagle3", lambda p: (p / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "pickle": ("tiny_eagle3", only_pickle, ["only pytorch_model.bin", "convert"]),
    "truncated": ("tiny_eagle3", truncate, ["cannot be read as safetensors"]),
    "not safetensors": (
        "tiny_eagle3",
        lambda p: (p / "model.safetensors").write_bytes(b"x" * 64),
        ["cannot be read as safetensors"],
    ),
    "lost shard": ("tiny_eagle3", lost_shard, ["model-2.safetensors", "2 shards"]),
    # architecture
    "a language model": (
        "tiny_eagle3",
        config(architectures=["LlamaForCausalLM"]),
        ["['LlamaForCausalLM']", "LlamaForCausalLMEagle3"],
    ),
    "no architecture": ("tiny_eagle3", config(architectures=...), ["None", "LlamaForCausalLMEagle3"]),
    "activation": ("tiny_eagle3", config(hidden_act="gelu"), ["hidden_act 'gelu'", "silu"]),
    "mlp bias": ("tiny_eagle2", config(mlp_bias=True), ["mlp_bias True"]),
    # sizes
    "hidden size": ("tiny_eagle2", config(hidden_size=128), ["hidden_size 128", "64"]),
    "target hidden size": ("tiny_eagle3", config(target_hidden_size=128), ["target_hidden_size 128", "64"]),
    "vocabulary": ("tiny_eagle3", config(vocab_size=500), ["vocab_size 500", "512"]),
    "no size": ("tiny_eagle3", config(hidden_size=...), ["hidden_size None", "whole number"]),
    "size a string": ("tiny_eagle3", config(num_hidden_layers="1"), ["num_hidden_layers '1'", "whole number"]),
    "heads": ("tiny_eagle3", config(num_attention_heads=3, head_dim=...), ["64", "3", "head_dim"]),
    "kv heads": ("tiny_eagle3", config(num_key_value_heads=3), ["num_key_value_heads 3", "divisor", "4"]),
    "head dim": ("tiny_eagle3", config(head_dim=32), ["q_proj", "[64, 128]", "[128, 128]"]),
    # aux layers
    "aux count": ("tiny_eagle3", config(num_aux_hidden_states=2), ["num_aux_hidden_states 2", "3 aux layers"]),
    "aux too high": ("tiny_eagle3", config(eagle_config={AUX: [1, 2, 6]}), ["[1, 2, 6]", "0 to 5", "7 layers"]),
    "aux negative": ("tiny_eagle3", config(eagle_config={AUX: [-1, 2, 4]}), ["[-1, 2, 4]", "0 to 5"]),
    "aux twice": ("tiny_eagle3", config(eagle_config={AUX: [1, 1, 4]}), ["[1, 1, 4]", "rising"]),
    "aux falling": ("tiny_eagle3", config(eagle_config={AUX: [4, 2, 1]}), ["[4, 2, 1]", "rising"]),
    "aux words": ("tiny_eagle3", config(eagle_config={AUX: "1,2,3"}), ["'1,2,3'", "list"]),
    "aux at top level": ("tiny_eagle3", config(**{AUX: [1, 3, 5]}), ["[1, 3, 5]", "top level", "[2, 3, 4]"]),
    "fc width": (
        "tiny_eagle3",
        config(eagle_config={AUX: [1, 2]}, num_aux_hidden_states=2),
        ["fc.weight", "[64, 192]", "[64, 128]"],
    ),
    # tensors
    "missing": ("tiny_eagle3", drop("fc.weight", "norm.weight"), ["fc.weight, norm.weight", "random"]),
    "missing in the layer": ("tiny_eagle3", drop("midlayer.mlp.up_proj.weight"), ["layers.0.mlp.up_proj.weight"]),
    "missing layer": ("tiny_eagle3", config(num_hidden_layers=2), ["layers.1.self_attn.q_proj.weight"]),
    "missing norm": ("tiny_eagle3", config(fc_norm=True), ["fc_norm.0.weight", "fc_norm.2.weight"]),
    "no fc bias": ("tiny_eagle2", drop("fc.bias"), ["fc.bias", "zeros"]),
    "model prefix": ("tiny_eagle2", tensors(prefixed), ["fc.weight", "without the prefix 'model.'"]),
    "shape": ("tiny_eagle3", put("norm.weight", torch.ones(3)), ["norm.weight", "[3]", "[64]"]),
    "quantised": ("tiny_eagle3", put("fc.weight", torch.ones(64, 192, dtype=torch.int8)), ["fc.weight", "I8", "BF16"]),
    "tied EAGLE-2": ("tiny_eagle2", config(tie_word_embeddings=True), ["tie_word_embeddings true", "false"]),
    "qkv bias": ("tiny_eagle3", put("midlayer.self_attn.q_proj.bias", torch.ones(64)), ["q_proj.bias", "drops"]),
    # P-EAGLE
    "mask width": ("tiny_eagle3", put("mask_hidden", torch.ones(1, 64)), ["mask_hidden", "[1, 64]", "[1, 192]"]),
    "no mask token": ("tiny_eagle3", put("mask_hidden", torch.ones(1, 192)), ["mask_token_id None", "0 to 511"]),
    # draft vocabulary
    "no lm_head": ("tiny_eagle3_reduced", drop("lm_head.weight"), ["lm_head.weight", "export"]),
    "no draft size": ("tiny_eagle3", config(draft_vocab_size=...), ["no draft_vocab_size", "512"]),
    "draft size": ("tiny_eagle3", config(draft_vocab_size=1000), ["1000", "512"]),
    "lm_head replaced": ("tiny_eagle3", config(draft_vocab_size=None), ["replaces", "512"]),
    "tied": ("tiny_eagle3", config(tie_word_embeddings=True), ["tie_word_embeddings true", "false"]),
    "no d2t": ("tiny_eagle3_reduced", drop("d2t"), ["128 of 512", "no d2t"]),
    "d2t length": ("tiny_eagle3_reduced", d2t(lambda t: t[:100].clone()), ["[100]", "[128]"]),
    "d2t too high": ("tiny_eagle3_reduced", set_d2t(3, 600), ["draft id 3", "603", "0 to 511"]),
    "d2t negative": ("tiny_eagle3_reduced", set_d2t(3, -4), ["draft id 3", "-1", "0 to 511"]),
    "d2t twice": ("tiny_eagle3_reduced", lambda p: d2t(_repeat_first)(p), ["128 draft ids to 127"]),
    "d2t not finite": ("tiny_eagle3_reduced", put("d2t", NAN), ["F32", "2 non-finite"]),
    "d2t a float": ("tiny_eagle3_reduced", put("d2t", torch.zeros(128)), ["F32", "int64"]),
    "lm_head rows": ("tiny_eagle3_reduced", put("lm_head.weight", torch.ones(64, 64)), ["[64, 64]", "[128, 64]"]),
}


def _repeat_first(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    table[1] = table[0] - 1
    return table


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str, request: pytest.FixtureRequest, tmp_path: Path, tiny_target: Path) -> None:
    source, edit, phrases = REFUSALS[case]
    folder = tmp_path / "head"
    shutil.copytree(request.getfixturevalue(source), folder)
    check_head(tiny_target, folder, algorithm=ALGORITHMS[source])  # good before the edit
    edit(folder)
    with pytest.raises(HeadError) as refused:
        check_head(tiny_target, folder, algorithm=ALGORITHMS[source])
    message = str(refused.value)
    for phrase in phrases:
        assert phrase in message
    assert str(folder) in message
    assert "\n" not in message and ". " not in message and not message.endswith(".")


@pytest.mark.parametrize(("source", "wrong"), [("tiny_eagle2", "EAGLE3"), ("tiny_eagle3", "EAGLE")])
def test_head_of_the_other_kind(source: str, wrong: str, request: pytest.FixtureRequest, tiny_target: Path) -> None:
    with pytest.raises(HeadError, match=f"use --speculative-algorithm {ALGORITHMS[source]} with this head"):
        check_head(tiny_target, request.getfixturevalue(source), algorithm=wrong)


def test_unknown_algorithm(tiny_eagle3: Path, tiny_target: Path) -> None:
    with pytest.raises(HeadError, match="MEDUSA, wanted EAGLE or EAGLE3"):
        check_head(tiny_target, tiny_eagle3, algorithm="MEDUSA")


def test_target_folder_missing(tiny_eagle3: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="is not a folder"):
        check_head(tmp_path / "none", tiny_eagle3, algorithm="EAGLE3")


def test_default_aux_layers_of_a_shallow_target(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config(tiny_target) | {"num_hidden_layers": 6}))
    with pytest.raises(HeadError, match=r"\[2, 3, 3\] of a target with 6 layers"):
        check_head(tmp_path, tiny_eagle3, algorithm="EAGLE3")


def test_info_eagle3(tiny_eagle3_reduced: Path, tiny_target: Path) -> None:
    parameters = sum(
        v.numel() for v in load_file(tiny_eagle3_reduced / "model.safetensors").values() if v.is_floating_point()
    )
    assert check_head(tiny_target, tiny_eagle3_reduced, algorithm="EAGLE3") == HeadInfo(
        architecture="LlamaForCausalLMEagle3",
        algorithm="EAGLE3",
        kind="eagle3",
        hidden_size=64,
        vocab_size=512,
        draft_vocab_size=128,
        aux_layer_ids=(1, 4, 6),
        num_layers=1,
        dtype="float32",
        parameters=parameters,
        bytes=4 * parameters,
    )


def test_info_eagle2(tiny_eagle2: Path, tiny_target: Path) -> None:
    info = check_head(tiny_target, tiny_eagle2, algorithm="EAGLE")
    assert (info.algorithm, info.aux_layer_ids, info.draft_vocab_size) == ("EAGLE", (), 512)


@pytest.mark.parametrize("name", ["markov_eagle3", "markov_eagle3_reduced", "markov_eagle2"])
def test_markov_heads(name: str, request: pytest.FixtureRequest, markov_target: Path) -> None:
    check_head(markov_target, request.getfixturevalue(name), algorithm="EAGLE" if name.endswith("2") else "EAGLE3")


def test_shipped_head(tmp_path: Path) -> None:
    target = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}  # SmolLM2-135M-Instruct
    (tmp_path / "config.json").write_text(json.dumps(target))
    info = check_head(tmp_path, SHIPPED, algorithm="EAGLE3")
    assert (info.aux_layer_ids, info.draft_vocab_size, info.dtype) == ((2, 15, 27), 16384, "bfloat16")


def rename(old: str, new: str) -> Edit:
    return tensors(lambda t: [t.update({k.replace(old, new, 1): t.pop(k)}) for k in list(t) if k.startswith(old)])


ACCEPTED: dict[str, Edit] = {
    "layers.0": rename("midlayer", "layers.0"),
    "model.midlayer": rename("midlayer", "model.midlayer"),
    "model.layers.0": rename("midlayer", "model.layers.0"),
    "model.fc": rename("fc", "model.fc"),
    "shards": shards,
    "with embedding": put("embed_tokens.weight", torch.zeros(512, 64)),
    "bfloat16": tensors(lambda t: t.update({k: v.bfloat16() for k, v in t.items()})),
    "null heads": config(num_key_value_heads=2, head_dim=None),
    "shared lm_head": lambda p: (config(draft_vocab_size=None)(p), drop("lm_head.weight")(p))[0],
    "explicit default": config(eagle_config={AUX: [1, 2, 3]}, num_aux_hidden_states=...),
    "top level too": config(**{AUX: [2, 3, 4]}),
    "last hidden state": config(eagle_config={"use_aux_hidden_state": False}),
    "aux norms": lambda p: (config(use_aux_norm=True)(p), tensors(_aux_norms)(p))[0],
}


def _aux_norms(t: dict[str, torch.Tensor]) -> None:
    t.update({f"aux_norm_{level}.weight": torch.ones(64) for level in ("low", "mid", "high")})


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_variant(case: str, tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    ACCEPTED[case](folder)
    info = check_head(tiny_target, folder, algorithm="EAGLE3")
    assert info.draft_vocab_size == 512
    assert info.aux_layer_ids == (() if case == "last hidden state" else (2, 3, 4))


AUX_RULES = {  # architecture, layers: ids in eagle_config -> what SGLang captures
    ("LlamaForCausalLM", 7): ([1, 3, 5], (2, 4, 6)),
    ("DeepseekV3ForCausalLM", 7): ([3, 4, 5], (3, 4, 5)),
    ("KimiK25ForConditionalGeneration", 7): ([1, 3, 5], (2, 4, 6)),
    ("GptOssForCausalLM", 8): ([1, 3, 5], (2, 4, 6)),
    ("MiniMaxM3SparseForConditionalGeneration", 8): (None, (3, 5, 6)),
}


@pytest.mark.parametrize("case", AUX_RULES)
def test_aux_ids_by_architecture(case: tuple[str, int], tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    ids, captured = AUX_RULES[case]
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config(eagle_config={} if ids is None else {AUX: ids})(folder)
    target = read_config(tiny_target) | {"architectures": [case[0]], "num_hidden_layers": case[1]}
    (tmp_path / "config.json").write_text(json.dumps(target))
    assert check_head(tmp_path, folder, algorithm="EAGLE3").aux_layer_ids == captured


def test_last_boundary_of_gpt_oss(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    """With an id equal to the number of layers this class takes all ids as they are: not these layers' inputs."""
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config(eagle_config={AUX: [1, 3, 7]})(folder)
    target = read_config(tiny_target) | {"architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(target))
    with pytest.raises(HeadError, match=r"inputs of layers \[1, 3, 7\]"):
        check_head(tmp_path, folder, algorithm="EAGLE3")


def test_short_context_is_a_warning(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    assert check_head(tiny_target, tiny_eagle3, algorithm="EAGLE3").warnings == ()
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config(max_position_embeddings=1024)(folder)
    (warning,) = check_head(tiny_target, folder, algorithm="EAGLE3").warnings
    assert "1024" in warning and "2048" in warning


def test_nested_target_config(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": read_config(tiny_target)}))
    assert check_head(tmp_path, tiny_eagle3, algorithm="EAGLE3").hidden_size == 64


def test_reads_headers_only(tiny_eagle3_reduced: Path, tiny_target: Path) -> None:
    code = (
        "import sys; from eagle_plugin.heads.checkpoint import check_head;"
        "check_head(sys.argv[1], sys.argv[2], algorithm='EAGLE3'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_target), str(tiny_eagle3_reduced)], check=True)

    def seconds() -> float:
        start = time.perf_counter()
        check_head(tiny_target, tiny_eagle3_reduced, algorithm="EAGLE3")
        return time.perf_counter() - start

    assert np.min([seconds() for _ in range(5)]) < 0.05
