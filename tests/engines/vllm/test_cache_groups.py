"""The groups of layers that the benchmarks count for the blocks of vLLM's cache, and those of a head that its worker
counts, are those that vLLM makes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from eagle_plugin.bench.cache_groups import cache_groups
from eagle_plugin.vllm.block_support import groups_of_head

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

WINDOW, FULL = "sliding_attention", "full_attention"
BLOCK = 128


def spec_of(kind: str, heads: int) -> KVCacheSpec:
    common = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**common) if kind == FULL else SlidingWindowSpec(**common, sliding_window=128)


def configured(kinds: list[str], drafter: tuple[int, ...]) -> Any:
    """What is read of a ``VllmConfig``."""

    def model(heads: int, **text: Any) -> Any:
        return SimpleNamespace(
            hf_text_config=SimpleNamespace(**text),
            attention_chunk_size=None,
            get_total_num_kv_heads=lambda: heads,
            get_head_size=lambda: 64,
        )

    return SimpleNamespace(
        model_config=model(8, layer_types=kinds),
        speculative_config=SimpleNamespace(draft_model_config=model(drafter[0], num_hidden_layers=len(drafter))),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=None),
    )


@pytest.mark.parametrize(
    ("full", "windows", "drafter"),
    [
        (12, 12, ()),
        (12, 12, (8,)),
        (12, 12, (8,) * 8),
        (12, 12, (4,) * 8),
        (12, 12, (16,)),
        (10, 52, ()),
        (10, 52, (8,)),
        (10, 52, (8, 8, 8, 8)),
        (4, 22, (4,)),
    ],
)
def test_the_groups_are_vllms(tmp_path: Path, full: int, windows: int, drafter: tuple[int, ...]) -> None:
    """drafter: heads of keys and values of the draft head's layers; the target's layers have 8."""
    kinds = [FULL] * full + [WINDOW] * windows
    layers = {f"layers.{i}": spec_of(kind, 8) for i, kind in enumerate(kinds)}
    layers |= {f"draft.{i}": spec_of(FULL, heads) for i, heads in enumerate(drafter)}
    unified = planning.unify_kv_cache_spec_page_size(layers)
    groups = planning._get_kv_cache_groups_uniform_page_size(unified)

    shape = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    head = None
    for name, more in (("target", {"layer_types": kinds}), ("head", {"num_hidden_layers": len(drafter)})):
        (tmp_path / name).mkdir()
        found = shape | more | ({"num_key_value_heads": drafter[0]} if name == "head" and drafter else {})
        (tmp_path / name / "config.json").write_text(json.dumps(found))
    if drafter:
        head = tmp_path / "head"
    assert cache_groups(tmp_path / "target", head) == len(groups)
    if drafter:
        owned = sum(any(name.startswith("draft.") for name in group.layer_names) for group in groups)
        assert groups_of_head(configured(kinds, drafter)) == owned
