"""Toy material for the tests of training: small random heads, random documents, and a target with a known optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.learning.data.store.features import Readout
from eagle_plugin.learning.train.batches import Batch, pack
from eagle_plugin.learning.train.blocks import BlockPass
from eagle_plugin.learning.train.parallel import MaskedRows, ParallelPass

AUX_LAYERS = (1, 2, 3)


@dataclass(frozen=True)
class ToyDocument:
    ids: Tensor
    mask: Tensor
    aux: Tensor | None
    last: Tensor
    scales: Tensor | None = None


def head_config(**values: Any) -> LlamaConfig:
    shape: dict[str, Any] = {
        "vocab_size": 40,
        "draft_vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**shape | values)


def randomise(head: nn.Module, seed: int, draft_ids: Tensor | None = None) -> Any:
    """Fill a head with seeded numbers of unit gain, so that every part of it matters."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*head.parameters(), *head.buffers()]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.dim() == 2 else 1 + 0.2 * noise)
    if isinstance(head, Eagle2Head):
        head.fc.bias.data.zero_()
    if draft_ids is not None and isinstance(head, Eagle3Head | DFlashHead):
        head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    return head


def eagle3_head(seed: int = 0, draft_ids: Tensor | None = None, **config: Any) -> Eagle3Head:
    if draft_ids is not None:
        config["draft_vocab_size"] = len(draft_ids)
    return randomise(Eagle3Head(head_config(**config), AUX_LAYERS), seed, draft_ids)


def eagle2_head(seed: int = 0, **config: Any) -> Eagle2Head:
    return randomise(Eagle2Head(head_config(**config)), seed)


def peagle_head(seed: int = 0, draft_ids: Tensor | None = None, **config: Any) -> PEagleHead:
    if draft_ids is not None:
        config["draft_vocab_size"] = len(draft_ids)
    return randomise(PEagleHead(head_config(mask_token_id=39, **config), AUX_LAYERS), seed, draft_ids)


def dflash_head(
    seed: int = 0, draft_ids: Tensor | None = None, *, block: int = 5, causal: bool = False, **config: Any
) -> DFlashHead:
    config |= {
        "block_size": block,
        "is_causal": causal,
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
    }
    return randomise(DFlashHead(head_config(mask_token_id=39, **config), AUX_LAYERS), seed, draft_ids)


def parallel_states(head: PEagleHead, batch: Batch, rows: MaskedRows) -> dict[tuple[int, int], Tensor]:
    """The state of every verified row and of these masked rows in float32, by (anchor, depth)."""
    work = ParallelPass(head, batch, int(rows.depth.max()) + 1 if len(rows.depth) else 1, torch.float32)
    masked = work.draft_masked(rows, 0, work.keys, work.values)
    verified = {(anchor, 0): state for anchor, state in enumerate(work.states)}
    return verified | dict(zip(zip(*(x.tolist() for x in rows), strict=True), masked, strict=True))


def block_states(head: DFlashHead, batch: Batch, rows: MaskedRows, steps: int) -> dict[tuple[int, int], Tensor]:
    """The states of the rows of blocks in float32, by (anchor, depth)."""
    work = BlockPass(head, batch, steps, torch.float32)
    states = work.draft(rows, 0, work.keys, work.values)
    return dict(zip(zip(*(x.tolist() for x in rows), strict=True), states, strict=True))


def random_documents(lengths: list[tuple[int, int]], seed: int = 0, hidden: int = 16, vocab: int = 39) -> Batch:
    """A batch of documents given as (prompt tokens, response tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return pack(
        [
            ToyDocument(
                torch.randint(0, vocab, (prompt + response,), generator=generator),
                torch.arange(prompt + response) >= prompt,
                torch.randn(prompt + response, len(AUX_LAYERS) * hidden, generator=generator),
                torch.randn(prompt + response, hidden, generator=generator),
            )
            for prompt, response in lengths
        ]
    )


def random_readout(seed: int = 0, hidden: int = 16, vocab: int = 40) -> Readout:
    generator = torch.Generator().manual_seed(seed + 1000)
    return Readout(torch.randn(vocab, hidden, generator=generator), None)


class MarkovTarget:
    """A target whose next token depends only on the last one, so the lowest possible loss of every head is known.

    With transition matrix P and its stationary distribution pi, no head can have a lower loss at any draft step than
    the entropy sum_i pi_i H(P[i]); a head that does not know the d tokens drafted before, no lower one than that of
    P^(d+1).
    """

    def __init__(self, states: int, hidden: int, seed: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.transition = torch.softmax(2 * torch.randn(states, states, generator=self.generator), -1)
        self.stationary = torch.linalg.matrix_power(self.transition, 200)[0]
        self.features = torch.randn(states, len(AUX_LAYERS) * hidden, generator=self.generator)
        self.vocab = states + 1  # one more token, which never occurs: the mask token of parallel drafting
        self.codes = torch.eye(states, hidden)
        weight = torch.full((self.vocab, hidden), -30.0)
        weight[:states, :states] = self.transition.log().T
        weight[:, states:] = 0
        self.readout = Readout(weight, None)

    def entropy(self, power: int = 1) -> float:
        """The mean entropy of the token `power` places ahead, in nats."""
        ahead = torch.linalg.matrix_power(self.transition, power)
        return -(self.stationary[:, None] * ahead * ahead.log()).sum().item()

    def batch(self, documents: int, length: int, noise: float = 0.0) -> Batch:
        """Sampled documents, all of them response; noise is the standard deviation of the last hidden states'."""
        ids = torch.multinomial(self.stationary, documents, True, generator=self.generator)[:, None]
        for _ in range(length - 1):
            following = torch.multinomial(self.transition[ids[:, -1]], 1, generator=self.generator)
            ids = torch.cat([ids, following], 1)
        last = self.codes[ids]
        last = last + noise * torch.randn(last.shape, generator=self.generator)
        mask = torch.ones(length, dtype=torch.bool)
        return pack([ToyDocument(row, mask, self.features[row], f) for row, f in zip(ids, last, strict=True)])
