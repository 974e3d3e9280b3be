"""P-EAGLE heads, written by hand, that know a target with unit embeddings: a Markov target or a bigram target.

A head of n layers drafts n + 1 levels. It follows the most likely text: its state at level d is the unit vector of the
token that the target's most likely text has d - 1 places after the newest one, and lm_head turns that into the target's
logits there. For a Markov target every level is right; for a bigram target the first is nearly, later ones often.

How: a token has two unit vectors, its own (as the embedding has it) and that of an id that the target never says, its
*copy*. A masked row has the flag `mask_hidden`, the unit vector of the mask token.
- Layer 0: a verified row attends to itself and takes its newest token. A masked row attends to the row before it; the
  first one takes the newest token of the last verified row, and the MLP, which only the flag opens, moves it on to the
  copy of the most likely next token.
- Each further layer: a masked row takes the copy of the row before it, and o_proj moves it on by one token. Verified
  rows have no copies, so that nothing changes there.
RoPE finds the row before: a query that is rotated back by one position agrees best with the key at distance 1.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from tiny_checkpoints import (
    PAD,
    Random,
    decoder_layer,
    draft_vocabulary,
    eagle3_config,
    read_config,
    save,
    write_config,
)
from torch import Tensor

HEADS, HEAD_DIM = 5, 64  # together they carry a whole unit vector
MASK = PAD
FLAG = 0.1  # length of the flag, beside contents of length 1
LOUD = 100.0  # of the stored features of a mask: what real features have in its place counts for nothing beside them
SHARP = 20000.0  # of the queries: the attention is on one row
FREQUENCIES = 3  # of RoPE that queries and keys use: the highest, so that the rows beside the right one score much less


class Copies(NamedTuple):
    """Dimensions of a head whose contents are tokens: each kept token has a second one, which nothing else uses."""

    lm_head: Tensor  # [V, V]: the target's, which reads the copies as it does the tokens, and nothing of the mask
    own: Tensor  # [kept] int64
    copies: Tensor  # [kept] int64
    of_next: Tensor  # [kept] int64: the copy of the most likely next token of each


def copies_of(target: str | Path, vocab: int, kept: list[int]) -> Copies:
    """For a head of these tokens, ascending, of a target with an embedding of unit vectors."""
    with safe_open(str(Path(target) / "model.safetensors"), framework="pt") as file:
        lm_head = file.get_tensor("lm_head.weight").float()
    own, copies = torch.tensor(kept), torch.tensor(unused_ids(vocab, kept, MASK))
    following = own[lm_head[kept][:, kept].argmax(0)]
    lm_head[:, copies] = lm_head[:, kept]
    lm_head[:, MASK] = 0
    return Copies(lm_head, own, copies, copies[torch.searchsorted(own, following)])


def peagle_head(
    path: str | Path,
    target: str | Path,
    kept: list[int],
    *,
    layers: int = 3,
    wrong: float = 0.0,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a head that drafts the tokens `kept`, ascending; `wrong` is the noise on its logits."""
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    vocab, random = t["vocab_size"], Random(seed)
    shape = {"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    shape |= {"head_dim": HEAD_DIM, "intermediate_size": vocab, "mask_token_id": MASK, "ptd_token_id": MASK}
    c = write_config(path, **(eagle3_config(t, dtype, len(kept), None) | shape))
    lm_head, _, copies, of_next = copies_of(target, vocab, kept)
    tensors: dict[str, Tensor] = {}
    for i in range(layers):
        tensors |= decoder_layer(random, f"layers.{i}", c, 2 * vocab if i == 0 else vocab, gain=0.0)
        tensors |= _attention(f"layers.{i}", vocab, copies, of_next, first=i == 0)
        tensors[f"layers.{i}.hidden_norm.weight"] = torch.ones(vocab)
    fc = torch.zeros(vocab, vocab)
    fc[MASK, MASK] = FLAG / LOUD / 3
    mask = torch.zeros(1, vocab)
    mask[0, MASK] = LOUD
    tensors |= _opened_by_the_flag(vocab, kept, of_next, c["rms_norm_eps"]) | {
        "fc.weight": torch.cat([fc] * 3, dim=1),
        "mask_hidden": mask.repeat(1, 3),
        "norm.weight": torch.ones(vocab),
        "lm_head.weight": lm_head[kept] + random.normal(len(kept), vocab, std=wrong / math.sqrt(vocab)),
    }
    if len(kept) < vocab:
        tensors |= draft_vocabulary(kept, vocab)
    save(path, tensors, dtype)
    return path


def unused_ids(vocab: int, kept: list[int], mask: int) -> list[int]:
    """Ids that a target which says only `kept` never says, one per kept token."""
    free = sorted(set(range(vocab)) - {*kept, mask}, reverse=True)
    assert len(free) >= len(kept), f"{len(kept)} tokens of {vocab} leave no ids for their copies"
    return free[: len(kept)]


def _attention(name: str, vocab: int, copies: Tensor, of_next: Tensor, first: bool) -> dict[str, Tensor]:
    """q, k, v and o of a layer, for rows whose norm makes a unit vector sqrt(vocab) long."""
    unit = torch.zeros(HEAD_DIM)
    unit[:FREQUENCIES] = 1
    theta = 10000.0 ** (-torch.arange(FREQUENCIES) * 2 / HEAD_DIM)
    before = torch.zeros(HEAD_DIM)  # `unit`, rotated back by one position
    before[:FREQUENCIES], before[HEAD_DIM // 2 : HEAD_DIM // 2 + FREQUENCIES] = theta.cos(), -theta.sin()
    inner, length = HEADS * HEAD_DIM, math.sqrt(vocab)
    width = 2 * vocab if first else vocab  # the first layer reads the embedding before the hidden state
    q, k, v, o = (torch.zeros(*shape) for shape in ((inner, width), (inner, width), (inner, width), (vocab, inner)))
    q[:, :vocab] = SHARP * unit.repeat(HEADS)[:, None] / length
    q[:, MASK] = 0
    q[:, width - vocab + MASK] = SHARP * before.repeat(HEADS) / length
    k[:, :vocab] = unit.repeat(HEADS)[:, None] / length
    if first:
        v[:vocab, :vocab] = torch.eye(vocab) / length
        v[MASK, MASK] = 0
        o[:, :vocab] = torch.eye(vocab)
    else:
        q[:, copies] = 0
        v[copies, copies] = 1 / length
        o[of_next, copies] = 1
    parts = {"q": q, "k": k, "v": v, "o": o}
    return {f"{name}.self_attn.{part}_proj.weight": matrix for part, matrix in parts.items()}


def _opened_by_the_flag(vocab: int, kept: list[int], of_next: Tensor, eps: float) -> dict[str, Tensor]:
    """The MLP of layer 0: in a masked row that holds a token the copy of the most likely next one takes its place."""
    norm = math.sqrt((FLAG**2 + 1) / vocab + eps)
    gate, up, down = (torch.zeros(vocab, vocab) for _ in range(3))
    rows = torch.arange(len(kept))
    gate[rows, MASK] = 1.0
    up[rows, torch.tensor(kept)] = 1.0
    value = F.silu(torch.tensor(FLAG / norm)) / norm
    down[of_next, rows] = 1 / value
    down[torch.tensor(kept), rows] -= 1 / value
    parts = {"gate": gate, "up": up, "down": down}
    return {f"layers.0.mlp.{part}_proj.weight": matrix for part, matrix in parts.items()}
