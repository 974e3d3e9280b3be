"""Latent attention (MLA) in vLLM that also attends over draft trees: the layers of DeepSeek-V2, V3 and Kimi-K2.

vLLM's layer stores the new latent rows and multiplies queries and results by its halves of ``kv_b_proj`` (the absorbed
form). What is left is attention with one key head, whose values are the first numbers of each key: that is ours, for
prompts as well as for trees.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from eagle_plugin.vllm.attention import TreeMetadata, TreeMetadataBuilder, attend_extend, attend_trees
from eagle_plugin.vllm.cache_layout import CacheRows


class LatentMetadata(TreeMetadata):
    """Of latent layers, whose cache has one row per token. vLLM's layer takes all query rows for those of decoding."""

    num_decodes, num_prefills = 1, 0
    decode = True  # it wants this not to be None

    @property
    def num_decode_tokens(self) -> int:
        """Query rows whose queries vLLM's layer multiplies for the absorbed form: all."""
        return len(self.slots)

    @property
    def num_actual_tokens(self) -> int:
        """Query rows that are no padding."""
        return len(self.slots)


class LatentMetadataBuilder(TreeMetadataBuilder):
    """Builds the metadata of the latent layers of one cache group."""

    kind = LatentMetadata


class LatentAttentionImpl(CPUMLAImpl):
    """Attention of one latent layer over vLLM's own cache of a CPU."""

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """Attend in the absorbed form: q [N, H, kv_lora_rank + rope], or its two parts -> [N, H, kv_lora_rank]."""
        query = q if isinstance(q, Tensor) else torch.cat(q, dim=-1)
        keys = latent_rows(kv_c_and_k_pe_cache)
        cache = CacheRows(keys, keys[..., : self.kv_lora_rank])
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        options = {"scale": self.scale}
        if attn_metadata.rows.extend is not None:
            attend_extend(query, cache, attn_metadata, options, out)
        if attn_metadata.rows.tree is not None:
            attend_trees(query, cache, attn_metadata, options, out)
        return out, None


class LatentAttentionBackend(CPUMLABackend):
    """Registered over CPU_MLA, vLLM's own backend for these layers on a CPU, whose cache ours are too."""

    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        """The layers' class."""
        return LatentAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:  # type: ignore[override]
        """The metadata's builder."""
        return LatentMetadataBuilder


def latent_rows(kv_cache: Tensor) -> Tensor:
    """View a layer's cache [blocks, block size, C] as rows of one token each, [rows, 1, C]."""
    if not kv_cache.is_contiguous():
        raise ValueError(
            f"eagle-plugin cannot read a latent KV cache of strides {list(kv_cache.stride())}, it wants dense blocks: "
            "start the server with EAGLE_PLUGIN=0"
        )
    return kv_cache.view(-1, 1, kv_cache.shape[-1])


def latent_names(layers: dict[str, Any]) -> Collection[str]:
    """The names of those of a model's attention layers that are latent."""
    return frozenset(name for name, layer in layers.items() if isinstance(layer, MLAAttention))
