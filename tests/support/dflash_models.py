"""DFlash drafters of Qwen3 layers: random ones, and some written by hand that know a target with unit embeddings.

A drafter of n layers that knows the target lists n levels right: the mask of level j gets the unit vector of the token
that the most likely text has j - 1 places after the root, and lm_head turns that into the target's logits after it.

How: a token has two unit vectors, its own and that of an id that the target never says, its *copy*. Every row attends
to the row before it (RoPE finds it, as in `peagle_models`) and adds the copy of its token, moved on by one token where
the row has a copy already. So each layer takes the text one mask further.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peagle_models import FREQUENCIES, HEAD_DIM, HEADS, copies_of
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    PAD,
    Random,
    decoder_layer,
    draft_vocabulary,
    head_config,
    read_config,
    save,
    write_config,
)
from torch import Tensor

MASK = PAD
FLAG = 0.1  # length of the embedding of masks, beside contents of length 1
SHARP = 5.0  # of the norms of queries and keys: the attention is on one row


def dflash_config(
    target: dict[str, Any], dtype: torch.dtype, target_layers: tuple[int, ...], block: int, **values: Any
) -> dict[str, Any]:
    """config.json of a drafter that reads the output of these layers, counted from 0."""
    own = {
        "model_type": "qwen3",
        "block_size": block,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(target_layers)},
    }
    return head_config(target, "DFlashDraftModel", dtype) | own | values


def tiny_dflash(
    path: str | Path,
    target: str | Path,
    *,
    layers: int = 2,
    block: int = 8,
    target_layers: tuple[int, ...] = (1, 3, 5),
    seed: int = 7,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random drafter for `target`; embedding and lm_head are the target's. config: more keys of config.json."""
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    c = write_config(path, **dflash_config(t, dtype, target_layers, block, num_hidden_layers=layers, **config))
    random, hidden = Random(seed), c["hidden_size"]
    tensors = {
        "fc.weight": random.projection(hidden, len(target_layers) * hidden),
        "hidden_norm.weight": 1 + random.normal(hidden, std=0.2),
        "norm.weight": 1 + random.normal(hidden, std=0.2),
    }
    for i in range(layers):
        tensors |= decoder_layer(random, f"layers.{i}", c, hidden, gain=1.5)
        for part in "qk":
            tensors[f"layers.{i}.self_attn.{part}_norm.weight"] = 1.3 + random.normal(c["head_dim"], std=0.2)
    save(path, tensors, dtype)
    return path


def dflash_head(
    path: str | Path,
    target: str | Path,
    kept: list[int],
    *,
    layers: int = 3,
    block: int = 8,
    wrong: float = 0.0,
    by_context: bool = False,
    own_tables: bool = True,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a drafter of the tokens `kept`, ascending, that knows the target; `wrong` is the noise on its logits.

    by_context: for Markov targets. It takes the root from the target's state of the token before, and nothing from the
    root's own embedding; it is right in one level less. own_tables: False for one that uses the target's embedding and
    output layer, which `lend_tables` must have made; `wrong` is the noise on its last state then.
    """
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    vocab, random = t["vocab_size"], Random(seed)
    shape = {"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    shape |= {"head_dim": HEAD_DIM} | ({"draft_vocab_size": len(kept)} if own_tables else {})
    c = write_config(path, **dflash_config(t, dtype, (1, 3, 5), block, **shape))
    lm_head, own, copies, of_next = copies_of(target, vocab, kept)
    embedding, fc = torch.eye(vocab), torch.zeros(vocab, vocab)
    embedding[MASK] *= FLAG
    if by_context:
        embedding = FLAG * torch.eye(vocab)[[MASK]].repeat(vocab, 1)
        fc = torch.eye(vocab)
    else:
        fc[MASK] = 1  # the same of every token, of which no value is taken
    tensors = {
        "fc.weight": torch.cat([fc / 3] * 3, dim=1),
        "hidden_norm.weight": torch.ones(vocab),
        "norm.weight": torch.ones(vocab),
    }
    if own_tables:
        noise = random.normal(len(kept), vocab, std=wrong / math.sqrt(vocab))
        tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": lm_head[kept] + noise}
    for i in range(layers):
        gain = wrong if not own_tables and i == layers - 1 else 0.0
        tensors |= decoder_layer(random, f"layers.{i}", c, vocab, gain=gain)
        tensors |= _attention(f"layers.{i}", vocab, own, copies, of_next)
    if own_tables and len(kept) < vocab:
        tensors |= draft_vocabulary(kept, vocab)
    save(path, tensors, dtype)
    return path


def lend_tables(target: str | Path, kept: list[int]) -> None:
    """Let drafters of these tokens use a target's embedding and output layer: those of ids that nobody says change."""
    target = Path(target)
    vocab = read_config(target)["vocab_size"]
    tensors = load_file(str(target / "model.safetensors"))
    tensors["lm_head.weight"] = copies_of(target, vocab, kept).lm_head.to(tensors["lm_head.weight"].dtype)
    tensors["model.embed_tokens.weight"][MASK] *= FLAG
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})


def _attention(name: str, vocab: int, own: Tensor, copies: Tensor, of_next: Tensor) -> dict[str, Tensor]:
    """Queries that look one position back, and what a row takes over from there."""
    unit = torch.zeros(HEAD_DIM)
    unit[:FREQUENCIES] = 1
    theta = 10000.0 ** (-torch.arange(FREQUENCIES) * 2 / HEAD_DIM)
    before = torch.zeros(HEAD_DIM)  # `unit`, rotated back by one position
    before[:FREQUENCIES], before[HEAD_DIM // 2 : HEAD_DIM // 2 + FREQUENCIES] = theta.cos(), -theta.sin()
    inner, length = HEADS * HEAD_DIM, math.sqrt(vocab)
    q, k = (of.repeat(HEADS)[:, None].repeat(1, vocab) for of in (before, unit))
    v, o = torch.zeros(inner, vocab), torch.zeros(vocab, inner)
    v[own, own] = 1 / length
    v[copies, copies] = 1 / length
    o[copies, own] = 1  # a token becomes its copy
    o[of_next, copies] = 1  # and a copy that of the next token
    parts = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o}
    norms = {"q_norm": torch.full((HEAD_DIM,), SHARP), "k_norm": torch.full((HEAD_DIM,), SHARP)}
    return {f"{name}.self_attn.{part}.weight": matrix for part, matrix in (parts | norms).items()}
