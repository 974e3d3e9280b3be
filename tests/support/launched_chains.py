"""Which variants of the attention kernels are compiled before the first request: those of fake launches on fake CUDA
tensors, which are counted by the constants that Triton would compile them for.

test_chain_kernels.py runs these tests, in a process that has Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import build_guard
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_plugin.kernels import triton_attention, triton_merge, triton_tiles
from eagle_plugin.vllm import attention, chain_kernels
from eagle_plugin.vllm.attention import ExtendRows, Rows, TreeAttentionImpl, TreeMetadata, attend_extend
from eagle_plugin.vllm.cache_layout import cache_rows

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 1024},
    "cap": {"logits_soft_cap": 30.0},
    "float8": {"kv_cache_dtype": "fp8_e4m3"},
    "other heads": {"num_heads": 24, "num_kv_heads": 8},
}


class Launches:
    """Stands in for a Triton kernel and keeps the constants of its launches."""

    def __init__(self, found: set[Any]) -> None:
        self.found = found

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self.found.add((id(self), *sorted(constants.items())))


@pytest.fixture(autouse=True, scope="session")
def _guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.ops.load_library(str(build_guard(tmp_path_factory.mktemp("fake-cuda"))))


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What is launched, under fake tensors and on a fake GPU."""
    found: set[Any] = set()
    monkeypatch.setattr(triton_attention, "_attend", Launches(found))
    monkeypatch.setattr(triton_merge, "_merge", Launches(found))
    monkeypatch.setattr(triton_tiles, "_device", lambda index: triton_tiles.Device(132, hopper=True))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: FakeTensorMode())  # any context that does nothing
    return found


def layer_of(most: int = 131072, **options: Any) -> Any:
    """A layer as vLLM has it in its context of forwards, with the cache of 64 blocks."""
    given = {"num_heads": HEADS, "num_kv_heads": KV_HEADS} | options
    impl = TreeAttentionImpl(head_size=DIM, scale=0.1, **given)
    impl._model_config = SimpleNamespace(max_model_len=most)
    impl.rows_of = lambda kv_cache: cache_rows(  # type: ignore[method-assign]  # fake tensors have no address
        kv_cache if impl.float8 is None else kv_cache.view(impl.float8)
    )
    stored = torch.bfloat16 if impl.float8 is None else torch.uint8
    cache = torch.empty(64, BLOCK, impl.num_kv_heads, 2 * DIM, dtype=stored, device="cuda").transpose(1, 2)
    scale = torch.ones((), device="cuda")
    return SimpleNamespace(impl=impl, kv_cache=cache, _k_scale=scale, _v_scale=scale)


def runner_of(layers: dict[str, Any], **changes: Any) -> Any:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    sizes = {"max_num_reqs": 64, "max_num_tokens": 8192} | changes
    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, vllm_config=config, **sizes)


def serve(layer: Any, lens: list[int], context: int) -> None:
    """Attend from so many rows of each request, after `context` tokens, as an eager step does."""
    n, b = sum(lens), len(lens)
    of = dict(dtype=torch.int64, device="cuda")
    counts = torch.empty(b, **of)
    table = torch.empty(b, context + max(lens) + 9, dtype=torch.int32, device="cuda")
    rows = Rows(ExtendRows(counts, counts, counts, counts), None, extend_lens=lens)
    query = torch.empty(n, layer.impl.num_heads, DIM, dtype=torch.bfloat16, device="cuda")
    options = layer.impl.options(layer, query.device)
    metadata = TreeMetadata(rows, table, torch.empty(n, **of))
    attend_extend(query, layer.impl.rows_of(layer.kv_cache), metadata, options, torch.empty_like(query))


def serve_all(layers: dict[str, Any], contexts: Sequence[int]) -> None:
    """Short prompts, of few and of many requests, after short and long contexts; plain decoding, and a long prompt."""
    for layer in layers.values():
        for context in contexts:
            for requests in (1, 8, 10, 64):
                for rows in (1, 5, 40):
                    serve(layer, [rows] * requests, context)
            serve(layer, [1, 3, 5000], context)


@pytest.mark.parametrize(("most", "contexts"), [(4096, [300, 3000]), (131072, [300, 3000, 100_000])])
def test_requests_need_no_kernel_that_was_not_compiled(
    most: int, contexts: list[int], variants: set[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with FakeTensorMode(), caplog.at_level(logging.INFO):
        layers = {name: layer_of(most, **options) for name, options in KINDS.items()}
        chain_kernels.compile_chains(runner_of(layers), logging.getLogger())
        compiled = set(variants)
        serve_all(layers, contexts)
    assert compiled and variants == compiled
    [line] = caplog.messages
    assert "attention of eager steps is compiled" in line and "memory" not in line


def test_a_longer_context_needs_no_other_kernel(variants: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: by the width of a step's slot table it does."""
    with FakeTensorMode():
        layer = layer_of()
        serve(layer, [5] * 8, 300)
        short = set(variants)
        assert short
        serve(layer, [5] * 8, 3000)
        assert variants == short
        options = layer.impl.options
        monkeypatch.setattr(layer.impl, "options", lambda *of: {**options(*of), "most_keys": None})
        serve(layer, [5] * 8, 300)
        serve(layer, [5] * 8, 3000)
        assert variants > short


def test_without_the_warm_up_requests_need_kernels(variants: set[Any]) -> None:
    """Negative control: another kind of layer, another length and another number of requests are variants."""
    with FakeTensorMode():
        plain, window = layer_of(), layer_of(sliding_window=1024)
        counts = []
        for layer, lens in [(plain, [5]), (plain, [40]), (plain, [5] * 64), (window, [5])]:
            serve(layer, lens, 300)
            counts.append(len(variants))
    assert counts == sorted(set(counts)) and counts[0] > 0


def test_layers_of_one_kind_are_compiled_once(variants: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(chain_kernels, "_attend_padding", lambda *call: ran.append(call[1:]))
    with FakeTensorMode():
        for count in (1, 3):
            chain_kernels.compile_chains(runner_of({str(i): layer_of() for i in range(count)}), logging.getLogger())
    assert len(ran) % 2 == 0 and ran[: len(ran) // 2] == ran[len(ran) // 2 :]
    assert {length for _, length in ran} <= {1, 2, 4, 8, 16, 32, 64} and len(ran) // 2 <= 40


def test_it_ends_where_memory_does(
    variants: set[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[Any] = []
    healthy = attention.attend_chains

    def attend(query: torch.Tensor, *others: Any) -> None:
        ran.append(len(query))
        if len(ran) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        healthy(query, *others)

    monkeypatch.setattr(chain_kernels, "attend_chains", attend)
    with FakeTensorMode(), caplog.at_level(logging.INFO):
        runner = runner_of({"layer": layer_of()})
        chain_kernels.compile_chains(runner, logging.getLogger())
        assert len(ran) == 3 and "memory ended there" in caplog.messages[-1]


def test_a_cpu_compiles_nothing(variants: set[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chain_kernels.compile_chains(SimpleNamespace(device=torch.device("cpu")), logging.getLogger())
    assert not variants and not caplog.messages
