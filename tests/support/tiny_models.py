"""Small models on disk for tests: random Llama targets and heads, a Markov target and heads that draft it right.

Every writer is deterministic by its seed, fills `path` with config.json and model.safetensors (a target also gets a
real byte-level BPE tokenizer with a chat template), and returns `path`. Nothing here imports the package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tiny_checkpoints import (
    Random,
    decoder_layer,
    draft_vocabulary,
    dtype_name,
    eagle3_config,
    head_config,
    llama_config,
    printable_ids,
    read_config,
    save,
    write_config,
    write_tokenizer,
)
from torch import Tensor


def tiny_llama(
    path: str | Path,
    *,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 7,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random Llama target whose greedy text is printable, varied and never ends by itself.

    With fewer than 7 layers the default aux layers (2, L//2, L-3) coincide: such a target needs explicit ids.
    """
    path = Path(path)
    printable = write_tokenizer(path, vocab)
    c = llama_config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        torch_dtype=dtype_name(dtype),
    )
    write_config(path, **c)
    random = Random(seed)
    tensors = {"model.embed_tokens.weight": random.normal(vocab, hidden, std=1.0)}
    for i in range(layers):
        tensors |= decoder_layer(random, f"model.layers.{i}", c, hidden, gain=1.5)
    tensors["model.norm.weight"] = torch.ones(hidden)
    # Rows of small norm are never the argmax: special tokens, half characters and ids without a token are never
    # generated.
    rows = torch.full((vocab, 1), 0.02)
    rows[printable] = 1.0
    tensors["lm_head.weight"] = random.projection(vocab, hidden, 3.0) * rows
    save(path, tensors, dtype)
    return path


def tiny_eagle3_head(
    path: str | Path,
    target: str | Path,
    *,
    draft_vocab: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random EAGLE-3 head for `target`; `draft_vocab` keeps that many printable tokens."""
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    size, hidden = draft_vocab or t["vocab_size"], t["hidden_size"]
    c = write_config(path, **eagle3_config(t, dtype, size, aux_layers))
    random = Random(seed)
    tensors = decoder_layer(random, "midlayer", c, 2 * hidden, gain=1.0)
    tensors |= {
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "fc.weight": random.projection(hidden, c["num_aux_hidden_states"] * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": random.projection(size, hidden, 3.0),
    }
    if draft_vocab is not None:
        ids = printable_ids(Path(target))
        if draft_vocab > len(ids):
            raise ValueError(f"draft_vocab is {draft_vocab}, but the target has {len(ids)} printable tokens")
        order = torch.randperm(len(ids), generator=random.generator)[:draft_vocab]
        tensors |= draft_vocabulary(sorted(ids[int(i)] for i in order), t["vocab_size"])
    save(path, tensors, dtype)
    return path


def tiny_eagle2_head(
    path: str | Path, target: str | Path, *, seed: int = 2, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random EAGLE-2 head for `target`; embedding and lm_head are the target's."""
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    hidden = t["hidden_size"]
    c = write_config(path, **head_config(t, "LlamaForCausalLMEagle", dtype))
    random = Random(seed)
    tensors = decoder_layer(random, "layers.0", c, hidden, gain=1.0)
    del tensors["layers.0.input_layernorm.weight"]  # EAGLE's layer has none
    tensors |= {"fc.weight": random.projection(hidden, 2 * hidden), "fc.bias": torch.zeros(hidden)}
    save(path, tensors, dtype)
    return path


# --------------------------------------------------------------------------------------------------------------------
# A target whose next token is a function of the current one, and heads that know the function.


def markov_map(ids: list[int], vocab: int, seed: int) -> Tensor:
    """next token [vocab] i64: one cycle through all `ids`; every other token leads into the cycle."""
    generator = torch.Generator().manual_seed(seed)
    cycle = torch.tensor(ids)[torch.randperm(len(ids), generator=generator)]
    following = cycle[torch.arange(vocab) % len(ids)]
    following[cycle] = cycle.roll(-1)
    return following


def one_hot_rows(rows: Tensor, columns: int) -> Tensor:
    """Matrix [columns, len(rows)] whose column v is the unit vector of rows[v]."""
    matrix = torch.zeros(columns, len(rows))
    matrix[rows, torch.arange(len(rows))] = 1.0
    return matrix


def silent_layer(name: str, c: dict[str, Any], width: int, seed: int) -> dict[str, Tensor]:
    """A random layer whose attention and MLP run but add nothing to the residual stream."""
    tensors = decoder_layer(Random(seed), name, c, width, gain=1.0)
    tensors[f"{name}.self_attn.o_proj.weight"].zero_()
    tensors[f"{name}.mlp.down_proj.weight"].zero_()
    return tensors


def markov_target(
    path: str | Path,
    *,
    vocab: int = 320,
    layers: int = 7,
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a target with next token = f(current token): unit embeddings, silent layers, lm_head = the matrix of f.

    The probability of f(token) is above 0.999. Greedy text walks one cycle through the printable tokens.
    """
    path = Path(path)
    printable = write_tokenizer(path, vocab)
    c = llama_config(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=vocab,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        torch_dtype=dtype_name(dtype),
    )
    write_config(path, **c)
    tensors = {"model.embed_tokens.weight": torch.eye(vocab), "model.norm.weight": torch.ones(vocab)}
    for i in range(layers):
        tensors |= silent_layer(f"model.layers.{i}", c, vocab, seed + i)
    tensors["lm_head.weight"] = one_hot_rows(markov_map(printable, vocab, seed), vocab)
    save(path, tensors, dtype)
    return path


def read_markov_map(target: str | Path) -> Tensor:
    """f of a Markov target as i64 [vocab], from its lm_head."""
    with safe_open(str(Path(target) / "model.safetensors"), framework="pt") as file:
        return file.get_tensor("lm_head.weight").float().argmax(0)


def confused(vocab: int, wrong: float, seed: int) -> Tensor:
    """What the head takes token v for, as a matrix [vocab, vocab]: the identity, except that for a share `wrong`
    of the tokens another token comes first and the right one second (so that its child is the second best)."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(vocab)
    for v in torch.randperm(vocab, generator=generator)[: round(wrong * vocab)].tolist():
        matrix[v, v] = 0.9
        matrix[(v + 1) % vocab, v] = 1.0
    return matrix


def markov_eagle2_head(
    path: str | Path, target: str | Path, *, wrong: float = 0.0, seed: int = 3, dtype: torch.dtype = torch.float32
) -> Path:
    """Write the EAGLE-2 head that drafts a Markov target right, except after a share `wrong` of the tokens.

    fc = [sqrt(H) I, 0] on (embedding, hidden): its state is the target's final state after the newest token.
    """
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    vocab = t["vocab_size"]
    c = write_config(path, **head_config(t, "LlamaForCausalLMEagle", dtype))
    tensors = silent_layer("layers.0", c, vocab, seed)
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = torch.cat([math.sqrt(vocab) * confused(vocab, wrong, seed), torch.zeros(vocab, vocab)], 1)
    tensors["fc.bias"] = torch.zeros(vocab)
    save(path, tensors, dtype)
    return path


def markov_eagle3_head(
    path: str | Path,
    target: str | Path,
    *,
    reduced: bool = False,
    wrong: float = 0.0,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the EAGLE-3 head that drafts a Markov target right, except after a share `wrong` of the tokens.

    The residual stream holds the unit vector of the token BEFORE the newest one (fc averages the aux states). After
    the norm a unit vector is sqrt(H) long, so silu(gate) * up is one constant g on it and down = (P - I) / g moves it
    on to f(token), the newest token; lm_head is f again. `reduced` keeps only the tokens of the cycle (d2t).
    """
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    vocab, following = t["vocab_size"], read_markov_map(target)
    kept = sorted(set(following.tolist())) if reduced else list(range(vocab))
    c = write_config(path, **eagle3_config(t, dtype, len(kept), None))
    tensors = silent_layer("midlayer", c, 2 * vocab, seed)
    eye = torch.eye(vocab)
    length = torch.tensor(1.0 / math.sqrt(1.0 / vocab + c["rms_norm_eps"]))
    gain = torch.nn.functional.silu(length) * length
    step = one_hot_rows(following, vocab)
    tensors |= {
        "fc.weight": torch.cat([eye, eye, eye], 1) / 3,
        "midlayer.hidden_norm.weight": torch.ones(vocab),
        "midlayer.mlp.gate_proj.weight": eye,
        "midlayer.mlp.up_proj.weight": eye.clone(),
        "midlayer.mlp.down_proj.weight": (step - eye) / gain,
        "norm.weight": torch.ones(vocab),
        "lm_head.weight": (step @ confused(vocab, wrong, seed))[kept],
    }
    if reduced:
        tensors |= draft_vocabulary(kept, vocab)
    save(path, tensors, dtype)
    return path
