"""KV caches with pages of several tokens: greedy text of plain decoding by accepted trees, and no slot is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from broken_verifier import install
from cache_slots import check_aborted_requests
from family_models import family_head, sglang_target
from paged_trees import VARIABLE
from serving import OVERLAP, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

pytest.importorskip("sglang")

from eagle_plugin.sglang.dummy_batches import _allocated

SHAPE, TOKENS = (3, 8, 32), 64  # three windows, and one page of 64


@pytest.mark.server
@pytest.mark.parametrize(
    ("family", "page"),
    [
        ("gpt_oss", 16),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (("llama", 16), ("llama", 64), ("gpt_oss", 64), ("gemma4_text", 16), ("llama4_text", 64))
        ),
    ],
)
def test_greedy_text_equals_plain_decoding(family: str, page: int, tmp_path: Path) -> None:
    """The self-test runs first, on slots of its own."""
    target = sglang_target(tmp_path / "target", family)
    head = family_head(tmp_path / "head", target, "eagle3")
    environment = (
        OVERLAP
        | {"EAGLE_SELFTEST": "1"}
        | install(tmp_path / "plugins", "paged_trees")
        | {VARIABLE: "/".join(map(str, SHAPE))}
    )
    flags = ("--skip-server-warmup", "--page-size", str(page))
    plain = tiny_spec(target, extra_flags=flags)
    paged = replace(tiny_spec(target, head, (3, 1, 4), extra_flags=flags), environment=environment)
    prompts = make_prompts(12) + [prompt * 4 for prompt in make_prompts(3)]
    with serving([plain, paged], tmp_path / "logs") as (plain_server, paged_server):
        expected = responses(generate_all(plain_server, prompts, TOKENS, at_once=4))
        assert len(set(expected)) > len(prompts) * 0.8, "the target repeats itself: equality would prove little"
        for _ in range(2):  # then from the prefix cache
            answers = generate_all(paged_server, prompts, TOKENS, at_once=8)
            assert responses(answers) == expected
            assert accept_length(answers) > 1.1
        check_aborted_requests(paged_server, prompts, expected, TOKENS, times=1)
        log = paged_server.log_text()
    assert "is served by the plugin's draft trees (at most 3 steps, 8 children per node, 32 nodes" in log


@pytest.mark.parametrize("page", [1, 4])
def test_slots_of_the_self_test_are_in_both_pools_and_given_back(page: int) -> None:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    pools = type("Pools", (BaseSWAKVPool,), {"__init__": lambda self: None, "register_mapping": lambda *_: None})
    pools.__abstractmethods__ = frozenset()
    allocator = SWATokenToKVPoolAllocator(64, 32, page, torch.float32, "cpu", pools(), False)
    slots = _allocated(allocator, 24)
    assert slots is not None and len(slots.unique()) == 24
    windows = allocator.full_to_swa_index_mapping[slots]
    assert len(windows.unique()) == 24 and int(windows.min()) > 0
    assert _allocated(allocator, 12) is None and allocator.available_size() == 8
    assert allocator.full_available_size() == 40, "nothing is taken where one pool has too few"
    allocator.free(slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (64, 32)
    assert _allocated(SimpleNamespace(page_size=page, alloc=lambda count: count), 8) == 8
