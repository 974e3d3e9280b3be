"""The tensors of a block drafter: names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_plugin.heads.block_config import MARKOV, without_confidence
from eagle_plugin.heads.files import LeftToEngine, StoredTensor

TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # which an engine's class may read or not
_LAYER = "layers.{}."


def tensors_of_layers(config: dict[str, Any], width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that an engine's class would otherwise leave at random values; width: of what fc reads."""
    hidden, inner, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, (config.get("num_key_value_heads") or heads) * dim
    yield from (("fc.weight", (hidden, width)), ("hidden_norm.weight", (hidden,)), ("norm.weight", (hidden,)))
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, shape in shapes.items():
            yield f"{_LAYER.format(i)}{name}.weight", shape
        if config.get("attention_bias"):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{_LAYER.format(i)}self_attn.{name}.bias", shapes[f"self_attn.{name}"][:1]


def refuse_unknown(kind: str, tensors: dict[str, StoredTensor], wanted: dict[str, Any], folder: Path) -> None:
    """Raise LeftToEngine for tensors of a drafter of this kind that nothing would compute with."""
    tensors = without_confidence(tensors) if kind == MARKOV else tensors
    unknown = sorted(tensors.keys() - wanted.keys() - set(TABLES))
    if unknown:
        raise LeftToEngine(
            f"{folder} has {', '.join(unknown[:3])}, which a {kind} drafter does not have: only plain ones are served"
        )
