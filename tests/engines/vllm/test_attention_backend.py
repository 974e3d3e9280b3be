"""Where vLLM takes our attention backend, and what it then asks of it; test_attention.py has what it computes."""

from __future__ import annotations

import importlib
import types
import weakref
from typing import Any

import pytest
import torch
from engine_signatures import assignments, calls, holds, in_order
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import attention as attention_layer
from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.kv_cache_interface import FullAttentionSpec

from eagle_plugin.vllm.attention import Rows, TreeAttentionImpl, TreeMetadataBuilder, give_rows
from eagle_plugin.vllm.backend import (
    FlashPromptsBackend,
    TreeAttentionBackend,
    TritonPromptsBackend,
    forget_caches,
    tree_attention,
)

KV_HEADS, HEADS, SIZE, DIM = 2, 6, 16, 32


def configuration(device_type: str) -> Any:
    """What `tree_attention` reads and sets of a ``VllmConfig``."""
    return types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type=device_type),
        attention_config=types.SimpleNamespace(backend="the user's", backend_per_kind={"full_attention": "another"}),
        speculative_config=types.SimpleNamespace(attention_backend=None),
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_platform_gives_our_backend_while_a_model_is_built(device_type: str) -> None:
    """A CPU has one backend, which ours replaces; on a GPU the configuration of both models asks for ours by name."""
    config, backends = configuration(device_type), registry.AttentionBackendEnum
    before = configuration(device_type)
    with tree_attention(config):
        if device_type == "cpu":
            assert config == before and backends.CPU_ATTN.get_class() is TreeAttentionBackend
        else:
            asked = config.attention_config.backend
            assert asked is config.speculative_config.attention_backend is backends.CUSTOM
            assert asked.get_class() is FlashPromptsBackend and not config.attention_config.backend_per_kind
    assert config == before and backends.CPU_ATTN.get_class() is not TreeAttentionBackend
    with pytest.raises(ValueError, match="CUSTOM"):
        backends.CUSTOM.get_class()


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        (None, FlashPromptsBackend),
        ("FLASH_ATTN", FlashPromptsBackend),
        ("TRITON_ATTN", TritonPromptsBackend),
        ("FLASHINFER", FlashPromptsBackend),
        ("CUSTOM", TreeAttentionBackend),
    ],
)
def test_the_users_backend_says_what_prompts_are_attended_to_with(named: str | None, wanted: type) -> None:
    config, backends = configuration("cuda"), registry.AttentionBackendEnum
    config.attention_config.backend = None if named is None else backends[named]
    with tree_attention(config):
        assert config.attention_config.backend.get_class() is wanted


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("has_sliding_window", [False, True])
def test_a_gpu_accepts_our_backend(has_sink: bool, has_sliding_window: bool) -> None:
    """vLLM asks a backend that was named in the configuration whether it serves the layer."""
    for head_size, wanted in ((128, []), (512, ["head_size not supported"])):
        asked = selector.AttentionSelectorConfig(
            head_size, torch.bfloat16, "auto", 16, has_sink=has_sink, has_sliding_window=has_sliding_window
        )
        capability = DeviceCapability(9, 0)
        found = TreeAttentionBackend.validate_configuration(device_capability=capability, **asked._asdict())
        assert found == wanted


def test_graphs_leave_attention_out() -> None:
    assert TreeMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER  # type: ignore[arg-type]


def test_layers_with_chunks_get_our_backend_unwrapped() -> None:
    """backend.py: vLLM's wrapper is called by its module's name, and only the layers know the chunk then."""
    module = chunked_local_attention
    wrap = module.create_chunked_local_attention_backend
    made = module.ChunkedLocalAttention.__init__
    assert calls(made, "create_chunked_local_attention_backend") == [
        "create_chunked_local_attention_backend(underlying_attn_backend, attention_chunk_size)"
    ]
    assert assignments(made, "self.attention_chunk_size") == ["attention_chunk_size"]
    assert wrap(TreeAttentionBackend, 64).get_builder_cls() is not TreeMetadataBuilder
    with tree_attention(configuration("cpu")):
        assert module.create_chunked_local_attention_backend(TreeAttentionBackend, 64) is TreeAttentionBackend
    assert module.create_chunked_local_attention_backend is wrap
    # Every block stays: with drafts all layers have the cache of full attention.
    assert holds(VllmConfig.__post_init__, "self.model_config.attention_chunk_size is not None")
    (forward,) = calls(attention_layer.unified_attention_with_output, "self.impl.forward")
    assert forward.startswith("self.impl.forward(self, query, key, value, ")


def test_builders_of_one_group_of_caches_share_its_places() -> None:
    """In one forward: vLLM has a builder for each kind of layers, of the target and of the head."""
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    config = types.SimpleNamespace(num_lookahead_tokens=7)
    builders = [TreeMetadataBuilder(spec, [name], config, torch.device("cpu")) for name in ("target", "head")]
    bounds = torch.tensor([0, 1], dtype=torch.int32)

    def common(block: int) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=bounds, query_start_loc_cpu=bounds, seq_lens=bounds[1:] * 20, num_reqs=1,
            num_actual_tokens=1, max_query_len=1, max_seq_len=20, slot_mapping=torch.tensor([block * SIZE]),
            block_table_tensor=torch.full((1, 4), block, dtype=torch.int32),
        )  # fmt: skip

    one, other = common(1), common(2)
    rows = Rows(None, None)
    give_rows(builders, rows)
    first, second = (builder.build(0, one) for builder in builders)
    assert first.slot_table is second.slot_table and first.slots is second.slots and first.rows is rows
    third = builders[0].build(0, other)  # of another group of caches
    assert third.slot_table is not first.slot_table and int(third.slot_table[0, 0]) == 2 * SIZE
    give_rows(builders, None)
    one.block_table_tensor.fill_(3)  # the next step
    give_rows(builders, rows)
    assert int(builders[1].build(0, one).slot_table[0, 0]) == 3 * SIZE


def test_a_layer_holds_no_cache_that_the_engine_gave_up() -> None:
    """vLLM measures its graphs with a small cache, and allocates the one that serves over its memory."""
    layer, kept = TreeAttentionImpl(HEADS, DIM, 0.1, KV_HEADS), torch.zeros(4, SIZE, KV_HEADS, 2 * DIM)
    layer.rows_of(kept.transpose(1, 2))
    context = {"attention": types.SimpleNamespace(impl=layer), "experts": types.SimpleNamespace()}
    compilation = types.SimpleNamespace(static_forward_context=context)
    alive = weakref.ref(kept)
    del kept
    assert alive() is not None and layer._cache is not None
    forget_caches(types.SimpleNamespace(compilation_config=compilation))
    assert alive() is None and layer._cache is None


@pytest.mark.parametrize("runner", ["runner.TreeModelRunner", "v2_runner.V2TreeModelRunner"])
def test_caches_are_forgotten_before_others_are_allocated(runner: str) -> None:
    module, _, name = runner.partition(".")
    made = getattr(importlib.import_module(f"eagle_plugin.vllm.{module}"), name).initialize_kv_cache
    assert in_order(made, ["forget_caches(self.vllm_config)", "super().initialize_kv_cache"])
