"""What a request with an engine's sampling parameters draws, by transformers and a few lines of torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@cache
def load(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def prompt_ids(target: Path, prompt: str) -> list[int]:
    return AutoTokenizer.from_pretrained(target)(prompt).input_ids


def next_logits(target: Path, ids: Tensor) -> Tensor:
    """Logits [n, V] after sequences [n, length]; equal sequences are computed once."""
    distinct, where = torch.unique(ids, dim=0, return_inverse=True)
    with torch.no_grad():
        rows = [load(target)(part).logits[:, -1] for part in distinct.split(512)]
    return torch.cat(rows)[where]


def distribution(logits: Tensor, times: Tensor, setting: dict[str, Any]) -> Tensor:
    """SGLang's probabilities [n, V] float64 from raw logits [n, V]; times [n, V] counts the generated tokens.

    The engine's order: additive penalties, repetition, bias, temperature, then the filters, each of which looks at the
    probabilities before any filter.
    """
    x = logits.double()
    x = x - setting.get("frequency_penalty", 0.0) * times - setting.get("presence_penalty", 0.0) * (times > 0)
    scale = torch.where(times > 0, setting.get("repetition_penalty", 1.0), 1.0).double()
    x = torch.where(x > 0, x / scale, x * scale)
    for token, bias in setting.get("logit_bias", {}).items():
        x[:, int(token)] += bias
    if setting.get("temperature", 1.0) == 0:
        return torch.nn.functional.one_hot(x.argmax(-1), x.shape[1]).double()
    p = (x / setting.get("temperature", 1.0)).softmax(-1)
    ordered, tokens = p.sort(dim=-1, descending=True)
    ranks = torch.arange(p.shape[1])
    kept = ranks < setting.get("top_k", p.shape[1])
    kept = kept & (ordered.cumsum(-1) - ordered <= setting.get("top_p", 1.0))
    kept &= ordered >= setting.get("min_p", 0.0) * ordered[:, :1]
    p = torch.zeros_like(p).scatter_(1, tokens, ordered * kept)
    return p / p.sum(-1, keepdim=True)


def chain_filters(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """vLLM's filters on probabilities p [n, V] float64, one after another; the parameters are [n, 1].

    Min-p, then top-k with all that equal the k-th, then top-p: of what is left, in ascending order, the mass up to
    1 - top_p goes, but never the last token. Of equals the highest ids go first.
    """
    p = torch.where(p < min_p * p.amax(-1, keepdim=True), 0.0, p)
    p = torch.where(p < p.sort(-1).values.gather(1, (p.shape[1] - top_k).clamp(min=0)), 0.0, p)
    ascending, places = p.flip(-1).sort(dim=-1, stable=True)
    dropped = (ascending / p.sum(-1, keepdim=True)).cumsum(-1) <= 1 - top_p
    dropped[:, -1] = False
    p = torch.zeros_like(p).scatter_(1, p.shape[1] - 1 - places, ascending.masked_fill(dropped, 0.0))
    return p / p.sum(-1, keepdim=True)


def sample(target: Path, prompt: str, setting: dict[str, Any], count: int, length: int, seed: int) -> Tensor:
    """`count` continuations [count, length] int64 of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    start = prompt_ids(target, prompt)
    ids = torch.tensor([start]).expand(count, -1)
    times: Tensor | None = None
    for _ in range(length):
        logits = next_logits(target, ids)
        times = torch.zeros_like(logits) if times is None else times
        drawn = torch.multinomial(distribution(logits, times, setting), 1, generator=generator)
        times = times.scatter_add(1, drawn, torch.ones_like(drawn, dtype=times.dtype))
        ids = torch.cat([ids, drawn], dim=1)
    return ids[:, len(start) :]
