"""Checkpoints in the layouts of public heads, made by hand: real names of tensors and keys, tiny sizes.

Every layout names where it is public. Sizes are those of the fixture `tiny_target` (7 layers, 512 tokens).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
H, I, V, D, Q, KV = 64, 128, 512, 128, 64, 32  # noqa: E741 (hidden, MLP, tokens, draft tokens, rows of q, of k and v)
AUX = "eagle_aux_hidden_state_layer_ids"
CONVERTED, ACCEPTED = "converted", "accepted"


@dataclass(frozen=True)
class Layout:
    """A public layout and what becomes of it: a word, or the phrases of the sentence that refuses it."""

    source: str  # the public file or thread that shows it
    config: dict[str, Any]
    weights: Callable[[Random], Weights]
    check: str | tuple[str, ...]  # by the rules of SGLang
    export: str | tuple[str, ...]
    meant: tuple[int, ...] | None = None  # aux layers, where config.json can mean several
    vllm: str | tuple[str, ...] = ACCEPTED  # by the rules of vLLM
    target_keys: dict[str, Any] = field(default_factory=dict)


class Random:
    """Tensors of a head, always the same."""

    def __init__(self, target: Path) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def vector(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self.generator)

    def attention(self, name: str, width: int) -> Weights:
        shapes = {"q": (Q, width), "k": (KV, width), "v": (KV, width), "o": (H, Q)}
        return {f"{name}.self_attn.{part}_proj.weight": self.matrix(*shape) for part, shape in shapes.items()}

    def layer(self, name: str, width: int, *norms: str) -> Weights:
        shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
        mlp = {f"{name}.mlp.{part}_proj.weight": self.matrix(*shape) for part, shape in shapes.items()}
        norms = (*norms, "post_attention_layernorm")
        return self.attention(name, width) | mlp | {f"{name}.{norm}.weight": self.vector(H) for norm in norms}

    def eagle3(self, first: str = "midlayer", draft: int = D) -> Weights:
        """One layer with fc, norm and lm_head, and the tables of a draft vocabulary that starts at token 10."""
        made = self.layer(first, 2 * H, "hidden_norm", "input_layernorm")
        made |= {"fc.weight": self.matrix(H, 3 * H), "norm.weight": self.vector(H)}
        return made | {"lm_head.weight": self.matrix(draft, H)} | (tables(draft) if draft < V else {})

    def eagle1(self) -> Weights:
        return self.layer("layers.0", H) | {"fc.weight": self.matrix(H, 2 * H), "embed_tokens.weight": self.embedding}

    def biases(self, first: str, scale: float = 1.0) -> Weights:
        rows = {"q": Q, "k": KV, "v": KV, "o": H}
        return {f"{first}.self_attn.{part}_proj.bias": scale * self.vector(n) for part, n in rows.items()}


def tables(draft: int) -> Weights:
    known = torch.zeros(V, dtype=torch.bool)
    known[10 : 10 + draft] = True
    return {"d2t": torch.full((draft,), 10), "t2d": known}


SHAPE = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def llama(architecture: str, **keys: Any) -> dict[str, Any]:
    """A config.json that says everything at the top level."""
    named = {"architectures": [architecture], "model_type": "llama", "draft_vocab_size": D}
    return {k: v for k, v in (SHAPE | named | keys).items() if v is not ...}


def speculators(kind: str, inner: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A config.json of the library: the layer's keys in a part of their own."""
    named = {"peagle": "PEagleSpeculator", "eagle": "EagleSpeculator"}.get(kind, "Eagle3Speculator")
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    about = {"algorithm": kind, "proposal_methods": [method], "verifier": {"name_or_path": "tiny"}}
    layer = SHAPE | {"model_type": "llama", "head_dim": 16} | (inner or {})
    values = {"architectures": [named], "speculators_model_type": kind, "speculators_config": about}
    return values | {"draft_vocab_size": D, "transformer_layer_config": layer} | keys


def write(layout: Layout, folder: Path, target: Path) -> Path:
    """The folder of a head; one whose layout has no safetensors gets a pickle."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(layout.config))
    weights = {name: tensor.clone().contiguous() for name, tensor in layout.weights(Random(target)).items()}
    if "pickle" in layout.source:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(sorted(weights)))
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def draft(weights: Weights, names: dict[str, str], tokens: Tensor, features: Tensor) -> Tensor:
    """Logits of a one-layer EAGLE-3 head by the tensors as they are stored: written out, without a module of ours.

    tokens [n], features [n, 3 H] -> [n, draft vocabulary]; names: of `first` (the layer) and, where the layout has
    them, `input_norm` and `fc_norms`; the embedding is under embed_tokens.weight.
    """
    first = names["first"]

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    if "input_norm" in names:
        features = rms(features, names["input_norm"])
    if "fc_norms" in names:
        parts = zip(features.chunk(3, -1), names["fc_norms"].split(), strict=True)
        features = torch.cat([rms(part, name) for part, name in parts], -1)
    hidden = features @ weights["fc.weight"].T
    embeds = rms(weights["embed_tokens.weight"][tokens], f"{first}.input_layernorm")
    x = torch.cat([embeds, rms(hidden, f"{first}.hidden_norm")], -1)
    q, k, v = ((x @ weights[f"{first}.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, 16)) for p in "qkv")
    angles = torch.arange(len(tokens))[:, None] / 10000.0 ** (torch.arange(8) / 8)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = turn(q), turn(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 4
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", scores, v).flatten(1)
    hidden = hidden + attended @ weights[f"{first}.self_attn.o_proj.weight"].T
    x = rms(hidden, f"{first}.post_attention_layernorm")
    gate, up = (x @ weights[f"{first}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights[f"{first}.mlp.down_proj.weight"].T
    return rms(hidden, "norm") @ weights["lm_head.weight"].T
