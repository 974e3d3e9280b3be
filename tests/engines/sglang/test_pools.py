"""Targets with sliding windows or attention chunks: the copy of the keys that these can see, and what is not served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.swa_memory_pool", reason="the SGLang environment is not installed")

from sglang.srt.layers.radix_attention import RadixAttention

from eagle_plugin.kernels.attention_torch import tree_visible
from eagle_plugin.sglang import support
from eagle_plugin.sglang.pools import Pool, SlidingReader

REACH, CHAIN = 6, [0b1, 0b11, 0b111, 0b1111]


@pytest.mark.parametrize(("window", "chunk"), [(5, 0), (0, 8), (5, 8), (12, 8)])
def test_rows_see_the_same_keys_by_the_copy(window: int, chunk: int) -> None:
    requests, columns = 4, 40
    prefix_lens = torch.tensor([0, 7, 15, 30])  # chunks begin at 8 and 16 inside the trees
    slots = torch.arange(requests * columns).view(requests, columns)
    own = slots.gather(1, prefix_lens[:, None] + torch.arange(REACH))
    start = SimpleNamespace(prefix_lens=prefix_lens, table=slots.int(), slots=own)
    moved = torch.randperm(requests * columns)
    pool = Pool(SimpleNamespace(device=torch.device("cpu")), moved)
    rows = SlidingReader(pool, window, REACH, requests, columns, chunk).read(start)
    ancestors = torch.tensor(CHAIN)
    for lane, prefix in enumerate(prefix_lens.tolist()):
        limits = {"window": window or -1, "chunk": chunk}
        everything = tree_visible(ancestors, prefix, len(CHAIN), **limits)
        short = tree_visible(ancestors, int(rows.prefix_lens[lane]), len(CHAIN), **limits)
        for seen, few in zip(everything, short, strict=True):
            wanted = moved[slots[lane, : prefix + len(CHAIN)][seen]]
            assert torch.equal(rows.table[lane, : len(few)][few].long(), wanted)
    assert torch.equal(rows.slots, moved[own])


def chunk_reasons(layers: list[dict], **of_runner: object) -> list[str]:
    """What `support.unsupported_chunks` says of a target with these attention layers."""
    model = torch.nn.ModuleList([RadixAttention(2, 4, 1.0, 1, i, **layer) for i, layer in enumerate(layers)])
    config = SimpleNamespace(context_len=512, hf_config=SimpleNamespace(architectures=["Llama4ForCausalLM"]))
    runner = {"attention_chunk_size": None, "device": "cpu"} | of_runner
    return support.unsupported_chunks(SimpleNamespace(model=model, model_config=config, **runner))


def test_chunks_that_the_engine_does_not_know_are_left_to_it() -> None:
    """On a CPU its attention sees all keys: prompts and trees would be read by different rules."""
    layers = [{}, {"use_irope": True}]
    (reason,) = chunk_reasons(layers, attention_chunk_size=64)
    assert reason.startswith("target Llama4ForCausalLM: ") and "--context-length 64" in reason
    assert chunk_reasons(layers, attention_chunk_size=512) == []  # one chunk
    assert chunk_reasons(layers, attention_chunk_size=64, device="cuda") == []
    assert chunk_reasons([{}, {}], attention_chunk_size=64) == []  # of a layer that has none
    known = [{}, {"use_irope": True, "sliding_window_size": -65}]  # by eagle-plugin-sglang-cpu
    assert chunk_reasons(known, attention_chunk_size=64) == []
