"""Which heads can take each other's place in a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.same_form import check_same_form


def head(
    folder: Path, rows: int = 4, stored: torch.dtype = torch.float32, tensors: tuple[str, ...] = (), **options: Any
) -> Path:
    """tensors: more of them, of one number each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]} | options))
    more = {name: torch.zeros(1) for name in tensors}
    save_file({"fc.weight": torch.zeros(rows, 2, dtype=stored)} | more, folder / "model.safetensors")
    return folder


def test_an_option_that_is_off_may_be_left_out(tmp_path: Path) -> None:
    served = head(tmp_path / "served", dtype="float32")
    check_same_form(served, head(tmp_path / "new", fc_norm=False, dtype="bfloat16"))
    check_same_form(tmp_path / "new", served)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_floats_may_be_stored_otherwise(stored: torch.dtype, tmp_path: Path) -> None:
    """A trained head is bfloat16, whatever the head was from which it started."""
    check_same_form(head(tmp_path / "served"), head(tmp_path / "new", stored=stored, dtype="bfloat16"))


def test_a_parameter_may_have_the_name_of_another_trainer(tmp_path: Path) -> None:
    """Heads that are trained here are written as `layers.0`, and with both maps of the draft vocabulary."""
    served = head(tmp_path / "served", tensors=("midlayer.hidden_norm.weight", "model.norm.weight"), use_cache=True)
    check_same_form(served, head(tmp_path / "new", tensors=("layers.0.hidden_norm.weight", "norm.weight", "t2d")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc_norm": True}, "has fc_norm True in config.json, wanted None as the served head"),
        ({"pad_token_id": 0}, "has pad_token_id 0 in config.json, wanted None as the served head"),
        ({"stored": torch.int64}, r"has \[4, 2\] I64 for fc.weight, wanted \[4, 2\] F32"),
        ({"tensors": ("d2t",)}, r"has \[1\] F32 for d2t, wanted no such tensor"),
        ({"rows": 5}, r"has \[5, 2\] .* for fc.weight, wanted \[4, 2\]"),
    ],
)
def test_another_form_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadError, match=message):
        check_same_form(head(tmp_path / "served"), head(tmp_path / "new", **changes))
