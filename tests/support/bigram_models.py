"""A target whose text is random but short of choices, and an EAGLE-3 head that knows it nearly.

The next token depends on the current one and, a little, on all before it (the layers add a small noise to the residual
stream). The head sees only the current token, through a draft vocabulary and a perturbed lm_head: its q is near p but
nowhere equal, so that at temperature 1 some drafts are accepted and some are not.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from tiny_checkpoints import (
    Random,
    decoder_layer,
    draft_vocabulary,
    eagle3_config,
    llama_config,
    printable_ids,
    read_config,
    save,
    write_config,
    write_tokenizer,
)

VOCAB, HEADS, HEAD_DIM = 290, 5, 64  # the attention of the head carries a whole unit embedding: 5 * 64 > 290
SPOKEN = 40  # tokens that the target says; the others come once in thousands
SHARPNESS = 8.0  # every token attends to itself alone: with equal queries and keys RoPE favours distance 0


def spoken(target: Path) -> list[int]:
    """The ids that the target says, ascending: spread over the printable ones."""
    ids = printable_ids(target)
    return ids[:: len(ids) // SPOKEN][:SPOKEN]


def bigram_target(
    path: str | Path, *, layers: int = 7, heads: int = HEADS, vocab: int = VOCAB, noise: float = 0.004, seed: int = 11
) -> Path:
    """Write a float32 Llama target of unit embeddings; lm_head holds random logits for every current token."""
    path = Path(path)
    write_tokenizer(path, vocab)
    c = llama_config(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=vocab,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
    )
    write_config(path, **c)
    random = Random(seed)
    tensors = {"model.embed_tokens.weight": torch.eye(vocab), "model.norm.weight": torch.ones(vocab)}
    for i in range(layers):
        tensors |= decoder_layer(random, f"model.layers.{i}", c, vocab, gain=noise)
    logits = torch.full((vocab, vocab), -8.0)
    logits[spoken(path)] = random.normal(SPOKEN, vocab, std=2.0)
    tensors["lm_head.weight"] = logits / math.sqrt(vocab)  # the norm makes a unit vector sqrt(vocab) long
    save(path, tensors, torch.float32)
    return path


def bigram_eagle3_head(
    path: str | Path, target: str | Path, *, draft_vocab: int = 32, wrong: float = 0.5, seed: int = 12
) -> Path:
    """Write the head: its residual stream is the unit vector of the newest token at every depth of a draft.

    It starts from the vector of the token before (fc averages the aux states, or the head's own last state); attention
    reads the newest token's embedding and takes the older vector off. `wrong` is the noise on the logits.
    """
    path, t = Path(path), read_config(Path(target))
    vocab = t["vocab_size"]
    path.mkdir(parents=True, exist_ok=True)
    c = write_config(path, **eagle3_config(t, torch.float32, draft_vocab, None))
    random = Random(seed)
    kept = spoken(Path(target))[:draft_vocab]
    with safe_open(str(Path(target) / "model.safetensors"), framework="pt") as file:
        logits = file.get_tensor("lm_head.weight")[kept]
    eye, inner = torch.eye(vocab) / math.sqrt(vocab), c["num_attention_heads"] * HEAD_DIM
    pointing = torch.cat([torch.full((inner, vocab), SHARPNESS / math.sqrt(vocab)), torch.zeros(inner, vocab)], dim=1)
    moving = torch.zeros(inner, 2 * vocab)
    moving[:vocab] = torch.cat([eye, -eye], dim=1)
    tensors = decoder_layer(random, "midlayer", c, 2 * vocab, gain=0.0) | {
        "midlayer.self_attn.q_proj.weight": pointing,
        "midlayer.self_attn.k_proj.weight": pointing.clone(),
        "midlayer.self_attn.v_proj.weight": moving,
        "midlayer.self_attn.o_proj.weight": torch.eye(vocab, inner),
        "midlayer.hidden_norm.weight": torch.ones(vocab),
        "fc.weight": torch.cat([torch.eye(vocab)] * 3, dim=1) / 3,
        "norm.weight": torch.ones(vocab),
        "lm_head.weight": logits + random.normal(draft_vocab, vocab, std=wrong / math.sqrt(vocab)),
    }
    save(path, tensors | draft_vocabulary(kept, vocab), torch.float32)
    return path
