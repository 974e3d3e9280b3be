"""vLLM's cache has enough blocks for one request of the context, also for targets with several kinds of attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.bench.cache_groups import cache_groups
from eagle_plugin.bench.preparation import plain_spec
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.vllm_server import command

WINDOW, FULL = "sliding_attention", "full_attention"
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "layer_types": [WINDOW, FULL] * 12,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
                    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024},
}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 32, "vocab_size": 512, "num_attention_heads": 2}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
QWEN = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
OF_GPT_OSS = {"num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("target", "head", "groups"),
    [
        (GPT_OSS, None, 2),
        (GPT_OSS, OF_GPT_OSS, 2),  # 13 full layers and 12 with windows: 2 groups of 13
        (GPT_OSS, OF_GPT_OSS | {"num_key_value_heads": 16}, 25),  # a third kind, of one layer: groups of one layer
        (GEMMA, None, 7),  # 10 full layers and 52 with windows: groups of 10
        (GEMMA, {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}, 6),  # 11: groups of 11
        (LLAMA, LLAMA, 1),
        (MISTRAL, LLAMA, 1),  # all layers have the window, that of the head too
        (QWEN, LLAMA, 1),
    ],
)
def test_groups_of_layers(tmp_path: Path, target: dict[str, Any], head: dict[str, Any] | None, groups: int) -> None:
    folder = None if head is None else written(tmp_path / "head", head)
    assert cache_groups(written(tmp_path / "target", target), folder) == groups


def test_files_that_cannot_be_read_are_left_to_the_engine(tmp_path: Path) -> None:
    assert cache_groups(tmp_path, None) == 1
    assert cache_groups(written(tmp_path / "target", GPT_OSS), tmp_path / "none") == 1


def blocks(args: list[str]) -> int:
    return int(args[args.index("--num-gpu-blocks-override") + 1])


# Blocks that vLLM's start wants for 4,096 tokens, in blocks of 128: per group those of all tokens (gpt-oss, full: 32),
# or of the window and of what is computed at a time, and one that holds none.
@pytest.mark.parametrize(("target", "least"), [(GPT_OSS, 32 + 33 + 1), (GEMMA, 32 + 6 * 33 + 1), (LLAMA, 32 + 1)])
def test_the_servers_of_a_benchmark_start(tmp_path: Path, target: dict[str, Any], least: int) -> None:
    plain = plain_spec("vllm", written(tmp_path / "target", target), "cpu", 1, 1, 0)
    found = blocks(command(plain, 1))
    assert least <= found <= 2 * least  # and no more memory than they need
    # On a GPU the part of its memory that a server has bounds the cache.
    shared = ServerSpec(plain.target, "plain", engine="vllm", device="cuda").beside(2)
    assert "--num-gpu-blocks-override" not in command(shared, 1)
