"""How large a target and its features are, from config.json alone: no weights are read, and no memory is taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_plugin.collect.settings import StatesForm
from eagle_plugin.common.errors import first_line
from eagle_plugin.learning.data.dialogues import answers_of, read_dialogues
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.store.extraction import (
    BATCH_TOKENS,
    MAX_LENGTH,
    ExtractionStats,
    form_shards,
    select_rows,
)
from eagle_plugin.learning.data.store.feature_store import SHARD_BYTES
from eagle_plugin.learning.data.store.features import auto_class, find_decoder
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.shards import Entry, Layout, shard_bytes
from eagle_plugin.learning.data.target_files import read_target_json
from eagle_plugin.learning.data.target_identity import DIGESTS
from eagle_plugin.models.public import MXFP4_BITS

CACHE_BYTES = 2  # of a value in the KV cache
SAMPLE = 64  # documents whose part of a header is measured
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class TargetSizes:
    """A target's language model."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype_bytes: int  # of a weight that is not quantised
    parameters: int  # of the whole model
    weight_bytes: int
    active: int  # weights that one token is multiplied with, without the embedding and lm_head
    cache_bytes: int  # of one token in the KV cache
    attention: int  # FLOPs of one token for each token that it attends to

    def forward_flops(self, tokens: float, context: float) -> float:
        """FLOPs of `tokens` tokens, each of which attends to `context` tokens; without lm_head."""
        return tokens * (2 * self.active + context * self.attention)

    def readout_flops(self, tokens: float) -> float:
        """FLOPs of the logits of `tokens` tokens."""
        return tokens * 2 * self.vocab_size * self.hidden_size


def target_sizes(folder: str | Path) -> TargetSizes:
    """The sizes of the target in a folder, of which only config.json is read.

    Raises:
        DataError: transformers does not know the model.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    written = read_target_json(path)
    quantised = written.get("quantization_config") or {}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=False)
        decoder, text = find_decoder(model), config.get_text_config()
    except Exception as error:  # of as many kinds as there are classes
        raise DataError(
            f"{path} is of a model that transformers cannot make ({first_line(error)}); give the target's own folder"
        ) from error
    outside = {id(model.get_input_embeddings().weight)}
    experts = sum(p.numel() for name, p in decoder.named_parameters() if ".experts." in name)
    inside = sum(p.numel() for p in decoder.parameters() if id(p) not in outside and p.dim() > 1)
    count = next((getattr(text, key) for key in EXPERTS if getattr(text, key, None)), 1)
    used = (getattr(text, "num_experts_per_tok", None) or count) / count
    parameters = sum(p.numel() for p in model.parameters())
    dtype_bytes = 4 if str(written.get("dtype") or written.get("torch_dtype")) == "float32" else 2
    packed, bits = _quantised(quantised, experts, inside, 8 * dtype_bytes)
    heads, dim = (
        text.num_attention_heads,
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
    )
    layers = _attention_layers(text)
    return TargetSizes(
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        dtype_bytes=dtype_bytes,
        parameters=parameters,
        weight_bytes=round((parameters - packed) * dtype_bytes + packed * bits / 8),
        active=round(inside - experts * (1 - used)),
        cache_bytes=CACHE_BYTES * layers * _cached_values(text, dim),
        attention=4 * layers * heads * dim,
    )


def _quantised(config: dict[str, Any], experts: int, inside: int, plain: int) -> tuple[int, float]:
    """How many weights are quantised, and their bits: MXFP4 is for experts, other methods for all layers."""
    method = config.get("quant_method")
    if method is None:
        return 0, plain
    if method == "mxfp4":
        return experts, MXFP4_BITS
    return inside, float(config.get("bits") or 8)


def _attention_layers(text: Any) -> int:
    """The layers that keep keys and values of every token; recurrent ones keep a state instead."""
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return sum(kind != "linear_attention" for kind in types)


def _cached_values(text: Any, dim: int) -> int:
    """Values of one token in the KV cache of one layer."""
    if rank := getattr(text, "kv_lora_rank", None):  # latent attention
        return int(rank) + int(text.qk_rope_head_dim)
    return 2 * int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * dim


def features_layout(
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    aux_layers: tuple[int, ...],
    states: StatesForm = "bfloat16",
) -> Manifest:
    """A manifest that says how wide the features are, and not of which target they are."""
    nobody: dict[str, Any] = dict.fromkeys(("target", *DIGESTS), "")
    return Manifest(
        **nobody,
        aux_layers=aux_layers,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        dtype="bfloat16",
        max_length=MAX_LENGTH,
        states=states,
    )


@dataclass(frozen=True)
class StoreSizes:
    """The shards of a feature store that `data features` writes in one process."""

    documents: int
    tokens: int
    response_tokens: int
    size: int  # bytes


def sizes_of_rows(path: str | Path, manifest: Manifest) -> StoreSizes:
    """The exact size of the shards of these rows."""
    kept = select_rows(read_dialogues(path, MAX_LENGTH), set(), MAX_LENGTH, ExtractionStats())
    documents = tokens = answered = size = 0
    for number, shard in enumerate(form_shards(kept, manifest, BATCH_TOKENS, SHARD_BYTES)):
        entries = [_entry(row) for batch in shard for row in batch]
        size += shard_bytes(entries, f"shard-000-{number:06d}.safetensors", manifest, 0)
        documents += len(entries)
        tokens += sum(entry.length for entry in entries)
        answered += sum(entry.n_response for entry in entries)
    return StoreSizes(documents, tokens, answered, size)


def sizes_of_average(documents: int, prompt: int, answer: int, manifest: Manifest) -> StoreSizes:
    """About the size of the shards of documents of these lengths."""
    length = min(prompt + answer, MAX_LENGTH)
    row = TokenRow("source-0123456789abcdef#0", "source", [0] * prompt, [0] * (length - prompt), "stop")
    header = shard_bytes([_entry(row)] * SAMPLE, "shard-000-000000.safetensors", manifest, 0)
    size = round(documents * header / SAMPLE)
    return StoreSizes(documents, documents * length, documents * (length - prompt), size)


def bytes_per_token(manifest: Manifest) -> float:
    """Of a long document: states, id and mask."""
    return Layout.of(manifest, MAX_LENGTH).size / MAX_LENGTH


def _entry(row: TokenRow) -> Entry:
    length = len(row.prompt_ids) + len(row.response_ids)
    marked = sum(end - begin for begin, end in answers_of(row))
    return Entry(row.id, row.source, row.split, "", 0, length, marked, "")
