"""What names and shapes do not show: values that are not finite, and a head that is not as it was exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from head_edits import Edit, config, put, shards, tensors
from safetensors.torch import load_file
from trained_heads import trained_head

from eagle_plugin.cli import main
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.contents import CHUNK, scan
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError, read_tensors

SHIPPED = Path(__file__).parents[2] / "examples/heads/smollm2-135m-instruct-eagle3"
GATE, UP = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"


@pytest.fixture
def head(tiny_target: Path, tmp_path: Path) -> Path:
    """A head with a record, drafting from a part of the vocabulary."""
    trained = trained_head("eagle3", tiny_target, draft_ids=torch.arange(10, 138), norms="3.0")
    save_head(trained, tmp_path / "head", target_dir=tiny_target)
    return tmp_path / "head"


# ---------------------------------------------------------------------------------------------------------------------
# Values that are not finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite(
    dtype: torch.dtype, value: float, tiny_eagle3: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)

    def largest(t: dict[str, torch.Tensor]) -> None:
        t.update({name: weight.to(dtype) for name, weight in t.items()})
        t["midlayer.mlp.down_proj.weight"][0, :2] = torch.tensor([1, -1]) * torch.finfo(dtype).max

    tensors(largest)(folder)
    check_head(tiny_target, folder, algorithm="EAGLE3")  # the largest values are finite

    def spoil(t: dict[str, torch.Tensor]) -> None:
        t["midlayer.mlp.down_proj.weight"][-1, -1] = value
        t["midlayer.mlp.down_proj.weight"][0, 3] = value

    tensors(spoil)(folder)
    with pytest.raises(HeadError, match=r"midlayer\.mlp\.down_proj\.weight with 2 values that are not finite"):
        check_head(tiny_target, folder, algorithm="EAGLE3")


@pytest.mark.parametrize("place", [0, CHUNK // 2 - 1, CHUNK // 2, -1])
def test_every_chunk_is_read(place: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weight = torch.zeros(CHUNK + 5, dtype=torch.bfloat16)
    save_file({"a": torch.ones(3, dtype=torch.uint8), "weight": weight}, tmp_path / "model.safetensors")
    good = scan(read_tensors(tmp_path).values(), digests=True)
    weight[place] = float("nan")
    save_file({"a": torch.ones(3, dtype=torch.uint8), "weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match="weight with 1 values"):
        scan(read_tensors(tmp_path).values(), digests=False)
    weight[place] = 1.0
    save_file({"a": torch.ones(3, dtype=torch.uint8), "weight": weight}, tmp_path / "model.safetensors")
    changed = scan(read_tensors(tmp_path).values(), digests=True)
    assert changed["a"] == good["a"] and changed["weight"] != good["weight"]


# ---------------------------------------------------------------------------------------------------------------------
# The record of an export


def flip(t: dict[str, torch.Tensor]) -> None:
    """One bit of one weight."""
    t["fc.weight"].view(torch.int16)[5, 7] ^= 1 << 3


CHANGES: dict[str, tuple[Edit, str]] = {
    "a flipped bit": (tensors(flip), r"exported: fc\.weight differ"),
    "inverted t2d": (tensors(lambda t: t.update(t2d=~t["t2d"])), r"exported: t2d differ"),
    "gate and up swapped": (tensors(lambda t: t.update({GATE: t[UP], UP: t[GATE]})), f"exported: {GATE}, {UP} differ"),
    "another rope_theta": (config(rope_theta=5.0), r"rope_theta \(now 5\.0, exported as 10000\.0\)"),
    "another norm": (config(rms_norm_eps=0.1), "rms_norm_eps"),
    "heads of another size": (config(num_attention_heads=8, num_key_value_heads=4, head_dim=8), "head_dim"),
    "a key more": (config(partial_rotary_factor=0.25), r"partial_rotary_factor \(now 0\.25, exported as None\)"),
    "a tensor more": (put("layers.0.mlp.scale", torch.ones(3)), r"layers\.0\.mlp\.scale differ"),
    "everything": (tensors(lambda t: t.update({n: w + 1 for n, w in t.items() if w.is_floating_point()})), "10 more"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_head_is_refused(case: str, head: Path, tiny_target: Path) -> None:
    check_head(tiny_target, head, algorithm="EAGLE3")
    edit, named = CHANGES[case]
    edit(head)
    with pytest.raises(HeadError, match=named) as refused:
        check_head(tiny_target, head, algorithm="EAGLE3")
    message = str(refused.value)
    assert "is not as it was exported" in message and f"eagle-plugin export {head} NEW" in message
    assert "\n" not in message and ". " not in message


def test_what_may_change(head: Path, tiny_target: Path) -> None:
    """Another file layout, and keys that leave the head's numbers as they are."""
    config(max_position_embeddings=9000, torch_dtype="float16", transformers_version="5.0")(head)
    shards(head)
    assert check_head(tiny_target, head, algorithm="EAGLE3").warnings == ()


def test_a_wanted_change(head: Path, tiny_target: Path, tmp_path: Path) -> None:
    """The two ways out: the command of the message, and no record."""
    tensors(flip)(head)
    assert main(["export", str(head), str(tmp_path / "new"), "--target", str(tiny_target)]) == 0
    check_head(tiny_target, tmp_path / "new", algorithm="EAGLE3")
    path = head / "eagle_plugin.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tensors_sha256"}))
    check_head(tiny_target, head, algorithm="EAGLE3")


def test_the_shipped_head_has_a_record() -> None:
    record = json.loads((SHIPPED / "eagle_plugin.json").read_text())
    assert record["tensors_sha256"] == scan(read_tensors(SHIPPED).values(), digests=True)
    assert record["config"]["rope_theta"] == 100000.0


# ---------------------------------------------------------------------------------------------------------------------
# Tensors that nobody reads


@pytest.mark.parametrize(("source", "algorithm"), [("tiny_eagle2", "EAGLE"), ("tiny_eagle3", "EAGLE3")])
def test_unknown_tensors_are_named(
    source: str, algorithm: str, request: pytest.FixtureRequest, tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    shutil.copytree(request.getfixturevalue(source), folder)
    embedding = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"]
    put("embed_tokens.weight", embedding)(folder)  # many trainers store the target's
    put("layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))(folder)
    assert check_head(tiny_target, folder, algorithm=algorithm).warnings == ()
    for i in range(5):
        put(f"extra.{i}", torch.ones(3))(folder)
    (warning,) = check_head(tiny_target, folder, algorithm=algorithm).warnings
    assert "extra.0, extra.1, extra.2 and 2 more" in warning and "engine drops" in warning
