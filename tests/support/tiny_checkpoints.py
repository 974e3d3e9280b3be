"""What the writers of tests/support/tiny_models.py share: tokenizer, config.json, seeded weights, safetensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<s>", "</s>", "<pad>"]
# What a head's config.json takes over from its target's.
SHARED_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
]
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Enough different words for some 350 merges; the text itself means nothing to the tests.
CORPUS = """
The quick brown fox jumps over the lazy dog while seven wizards brew quiet potions behind an old stone bridge.
Speculative decoding drafts several tokens with a small head and verifies them with one forward of the target model.
A tree of candidates is scored by the sum of logarithms, and only the best nodes are kept for verification.
Please write a short story about a sailor who finds a map, crosses the winter sea, and returns with nothing but songs.
What is the capital of France? How many apples remain when Tom gives four of twelve to his younger sister?
def factorial(n): return 1 if n == 0 else n * factorial(n - 1)  # compute the product of all numbers below n
Explain in simple words why the sky looks blue at noon and red at sunset, then list three common mistakes.
user: system: assistant: hello, thank you very much, I would like to know more about machine learning today.
Rivers carry sand from mountains to plains; farmers along their banks have measured floods for thousands of years.
1 2 3 4 5 6 7 8 9 10 11 12 20 30 40 50 100 200 1000; x = y + z; for key, value in items.items(): print(key, value)
"""


def write_tokenizer(path: Path, vocab: int) -> list[int]:
    """Write a byte-level BPE tokenizer of at most `vocab` tokens; returns the ids that decode to printable ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS.strip().splitlines(), trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return printable_ids(path)


def printable_ids(target: Path) -> list[int]:
    """Ids that decode to printable ASCII (special tokens, line breaks and half characters do not)."""
    tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))
    responses = {i: tokenizer.decode([i]) for i in range(len(SPECIAL), tokenizer.get_vocab_size())}
    return [i for i, text in responses.items() if text and text.isascii() and text.isprintable()]


def write_config(path: Path, **values: Any) -> dict[str, Any]:
    (path / "config.json").write_text(json.dumps(values, indent=1))
    return values


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((Path(path) / "config.json").read_text())


def save(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    kept = {k: (v.to(dtype) if v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})


def llama_config(**values: Any) -> dict[str, Any]:
    """The keys common to targets and heads; `values` overrides."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    return config | values


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Random:
    """Seeded normal weights."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def projection(self, rows: int, cols: int, gain: float = 1.0) -> Tensor:
        return self.normal(rows, cols, std=gain / math.sqrt(cols))


def decoder_layer(random: Random, name: str, c: dict[str, Any], width: int, gain: float) -> dict[str, Tensor]:
    """Attention and MLP weights of one layer whose q, k, v read `width` columns."""
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    return {
        # Queries and keys above unit scale: attention picks single tokens, so the text depends on its context.
        f"{name}.self_attn.q_proj.weight": random.projection(q, width, 1.6),
        f"{name}.self_attn.k_proj.weight": random.projection(kv, width, 1.6),
        f"{name}.self_attn.v_proj.weight": random.projection(kv, width),
        f"{name}.self_attn.o_proj.weight": random.projection(hidden, q, gain),
        f"{name}.mlp.gate_proj.weight": random.projection(inner, hidden),
        f"{name}.mlp.up_proj.weight": random.projection(inner, hidden),
        f"{name}.mlp.down_proj.weight": random.projection(hidden, inner, gain),
        f"{name}.input_layernorm.weight": torch.ones(hidden),
        f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
    }


def head_config(target: dict[str, Any], architecture: str, dtype: torch.dtype, **values: Any) -> dict[str, Any]:
    config = llama_config(num_hidden_layers=1, torch_dtype=dtype_name(dtype), **{k: target[k] for k in SHARED_KEYS})
    return config | {"architectures": [architecture]} | values


def eagle3_config(
    target: dict[str, Any], dtype: torch.dtype, draft_vocab: int, aux_layers: tuple[int, ...] | None
) -> dict[str, Any]:
    """`aux_layers`: layers whose input is captured; the engine's key wants each less one, and none for the default."""
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if aux_layers is not None:
        eagle["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in aux_layers]
    return head_config(
        target,
        "LlamaForCausalLMEagle3",
        dtype,
        target_hidden_size=target["hidden_size"],
        draft_vocab_size=draft_vocab,
        num_aux_hidden_states=3 if aux_layers is None else len(aux_layers),
        norm_before_residual=False,
        eagle_config=eagle,
    )


def draft_vocabulary(ids: list[int], vocab: int) -> dict[str, Tensor]:
    """d2t (offsets from the draft id) and t2d of ascending target `ids`."""
    kept = torch.tensor(ids)
    seen = torch.zeros(vocab, dtype=torch.bool)
    seen[kept] = True
    return {"d2t": kept - torch.arange(len(ids)), "t2d": seen}
