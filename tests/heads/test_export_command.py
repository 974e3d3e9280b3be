"""`eagle-plugin export` from files to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trained_heads import rename, rewrite, trained_head

from eagle_plugin.cli import main
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import read_manifest

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def head(tiny_target: Path, tmp_path: Path) -> Path:
    trained = trained_head("eagle3", tiny_target, aux_layers=(1, 3, 5), norms="3.0")
    save_head(trained, tmp_path / "head", target_dir=tiny_target, manifest={"training": {"updates": 3}})
    return tmp_path / "head"


def test_an_official_head(head: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint names no architecture that an engine knows; what is written does, with vLLM's and SGLang's ids."""
    official = rewrite(
        head,
        tmp_path / "official",
        lambda c: c | {"architectures": ["LlamaForCausalLM"]},
        lambda w: rename(w, "layers.0", "midlayer"),
    )
    assert main(["export", str(official), str(tmp_path / "out"), "--target", str(tiny_target)]) == 0
    assert check_head(tiny_target, tmp_path / "out", algorithm="EAGLE3").aux_layer_ids == (1, 3, 5)
    assert '"method": "eagle3"' in capsys.readouterr().out


def test_ambiguous_ids(head: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = rewrite(head, tmp_path / "foreign", lambda c: {k: v for k, v in c.items() if k != AUX})
    command = ["export", str(foreign), str(tmp_path / "out"), "--target", str(tiny_target)]
    assert main(command) == 2
    assert "1,3,5 (SGLang's ids" in capsys.readouterr().err and not (tmp_path / "out").exists()
    as_vllm = ["export", str(foreign), str(tmp_path / "as-vllm"), "--target", str(tiny_target)]
    assert main([*as_vllm, "--aux-layers", "0,2,4"]) == 0  # what vLLM makes of the ids
    assert check_head(tiny_target, tmp_path / "as-vllm", algorithm="EAGLE3").aux_layer_ids == (0, 2, 4)
    assert main([*command, "--aux-layers", "2,4"]) == 2
    assert "wanted 64 for each of its 2 aux layers" in capsys.readouterr().err
    assert main([*command, "--aux-layers", "1,3,5"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[AUX] == [1, 3, 5] and config["eagle_config"][AUX] == [0, 2, 4]


def test_layers_that_the_ids_cannot_mean(
    head: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's word counts for a head of another project, whose ids may be wrong; ours has its layers on record."""
    foreign = rewrite(head, tmp_path / "foreign")
    command = ["--target", str(tiny_target), "--aux-layers", "2,4,6"]
    assert main(["export", str(foreign), str(tmp_path / "out"), *command]) == 0
    assert check_head(tiny_target, tmp_path / "out", algorithm="EAGLE3").aux_layer_ids == (2, 4, 6)
    assert (
        main(["export", str(foreign), str(tmp_path / "out"), "--target", str(tiny_target), "--aux-layers", "2,9,8"])
        == 2
    )
    assert "rising ids from 1 to 6" in capsys.readouterr().err
    assert main(["export", str(head), str(tmp_path / "ours"), *command]) == 2
    assert "cannot mean what --aux-layers" in capsys.readouterr().err


def test_our_own_head_keeps_its_manifest(head: Path, tiny_target: Path, tmp_path: Path) -> None:
    assert main(["export", str(head), str(tmp_path / "out"), "--target", str(tiny_target), "--dtype", "float32"]) == 0
    before, after = read_manifest(head), read_manifest(tmp_path / "out")
    assert before is not None and after is not None
    assert before.pop("tensors_sha256") != after.pop("tensors_sha256")  # in another type
    assert after == before
    assert check_head(tiny_target, tmp_path / "out", algorithm="EAGLE3").dtype == "float32"


def test_onto_itself(head: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(head), str(head), "--target", str(tiny_target)]) == 2
    assert "is the head itself" in capsys.readouterr().err


def test_a_window(head: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM reads it; a head that has one keeps it, and one that has a window of its own can get another."""
    command = ["--target", str(tiny_target)]
    assert main(["export", str(head), str(tmp_path / "out"), *command, "--window", "64"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention"], 64)
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "again"), *command]) == 0
    assert load_any_head(tmp_path / "again", tiny_target).window == 64
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "other"), *command, "--window", "7"]) == 0
    assert load_any_head(tmp_path / "other", tiny_target).window == 7
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["export", str(head), str(tmp_path / "none"), *command, "--window", "0"])
    assert "--window" in capsys.readouterr().err
