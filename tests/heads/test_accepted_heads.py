"""check_head: every head that the engine can serve is accepted and described, from its headers and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from head_edits import Edit, config, drop, put, rename, shards, tensors
from safetensors.torch import load_file

from eagle_plugin.heads.checkpoint import HeadError, HeadInfo, check_head
from eagle_plugin.heads.files import read_config

SHIPPED = Path(__file__).parents[2] / "examples" / "heads" / "smollm2-135m-instruct-eagle3"
AUX = "eagle_aux_hidden_state_layer_ids"


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

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    info = check_head(tmp_path, SHIPPED, algorithm="EAGLE3")
    assert bytes_read() - before < (SHIPPED / "model.safetensors").stat().st_size / 10
    assert (info.aux_layer_ids, info.draft_vocab_size, info.dtype) == ((2, 15, 27), 16384, "bfloat16")


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


@pytest.mark.parametrize(("architecture", "ids"), [("GptOssForCausalLM", [1, 3, 7]), ("Gemma3ForCausalLM", [0, 2, 6])])
def test_the_output_of_the_last_layer(
    architecture: str, ids: list[int], tiny_eagle3: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """These two classes of SGLang capture it, each with its own rule for ids; Llama's does not."""
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config(eagle_config={AUX: ids})(folder)
    for name, is_captured in ((architecture, True), ("LlamaForCausalLM", False)):
        (tmp_path / "config.json").write_text(json.dumps(read_config(tiny_target) | {"architectures": [name]}))
        if is_captured:
            assert check_head(tmp_path, folder, algorithm="EAGLE3").aux_layer_ids == (1, 3, 7)
        else:
            with pytest.raises(HeadError, match="wanted rising ones from 0 to 6"):
                check_head(tmp_path, folder, algorithm="EAGLE3")


def test_the_embedding_is_an_aux_layer(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    for ids, captured in (([-1, 3, 5], (0, 4, 6)), ([-2, 3, 5], None)):
        config(eagle_config={AUX: ids})(folder)
        if captured:
            assert check_head(tiny_target, folder, algorithm="EAGLE3").aux_layer_ids == captured
        else:
            with pytest.raises(HeadError, match="wanted rising ones from 0 to 6"):
                check_head(tiny_target, folder, algorithm="EAGLE3")


def test_last_boundary_of_gpt_oss(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    """With an id equal to the number of layers this class takes all ids as they are, and the last one names the output
    of the last layer; other classes capture no such output."""
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config(eagle_config={AUX: [1, 3, 7]})(folder)
    target = read_config(tiny_target) | {"architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(target))
    assert check_head(tmp_path, folder, algorithm="EAGLE3").aux_layer_ids == (1, 3, 7)
    config(eagle_config={AUX: [1, 3, 6]})(folder)
    with pytest.raises(HeadError, match=r"wanted rising ones"):
        check_head(tiny_target, folder, algorithm="EAGLE3")
    config(eagle_config={AUX: [1, 7, 3]})(folder)
    with pytest.raises(HeadError, match=r"inputs of layers \[1, 7, 3\]"):
        check_head(tmp_path, folder, algorithm="EAGLE3")


def test_short_context_is_a_warning(
    tiny_eagle3: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_head(tiny_target, tiny_eagle3, algorithm="EAGLE3").warnings == ()
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config(max_position_embeddings=1024)(folder)
    (warning,) = check_head(tiny_target, folder, algorithm="EAGLE3").warnings
    assert "1024" in warning and "2048" in warning and "does not start" in warning
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    (warning,) = check_head(tiny_target, folder, algorithm="EAGLE3").warnings
    assert "1024" in warning and "2048" in warning and "does not start" not in warning


def test_nested_target_config(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": read_config(tiny_target)}))
    assert check_head(tmp_path, tiny_eagle3, algorithm="EAGLE3").hidden_size == 64


def test_needs_no_torch(tiny_eagle3_reduced: Path, tiny_target: Path) -> None:
    code = (
        "import sys; from eagle_plugin.heads.checkpoint import check_head;"
        "check_head(sys.argv[1], sys.argv[2], algorithm='EAGLE3'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_target), str(tiny_eagle3_reduced)], check=True)
