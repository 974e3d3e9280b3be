"""Sizes that a target's config.json leaves out are those of its class; without one, a sentence says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.heads.files import HeadError, text_config
from eagle_plugin.heads.target_config import read_target_config

INNER = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4}  # as Gemma 3 lies on the hub
GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": INNER}


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_left_out_is_the_default_of_the_class(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    found = text_config(read_target_config(written(tmp_path, GEMMA)))
    assert found["vocab_size"] == Gemma3TextConfig().vocab_size and found["hidden_size"] == 64
    alone = {"architectures": ["Gemma3ForCausalLM"], **INNER}
    assert text_config(read_target_config(written(tmp_path, alone)))["vocab_size"] == Gemma3TextConfig().vocab_size


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "nobodys", "text_config": {"hidden_size": 64, "num_hidden_layers": 4}}, "vocab_size None"),
        ({"text_config": INNER | {"hidden_size": -1, "vocab_size": 9}}, "hidden_size -1, wanted a positive"),
        ({"text_config": INNER | {"num_hidden_layers": "4", "vocab_size": 9}}, "num_hidden_layers '4', wanted"),
        ({"architectures": "Gemma3ForCausalLM"}, "architectures 'Gemma3ForCausalLM', wanted a list"),
        ({"architectures": [["x"]]}, "wanted a list with the name of the target's class"),
    ],
)
def test_the_error_names_what_is_wrong(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="config.json") as refused:
        read_target_config(written(tmp_path, GEMMA | changes))
    assert says in str(refused.value)
