"""A head's drafts by our modules beside those of an engine, from the tokens on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_plugin.heads.draft_head import DraftHead

if TYPE_CHECKING:
    from vllm_models import Served

ROWS = 40


@torch.no_grad()
def read_with_transformers(target: Path, tokens: Tensor, aux_layers: tuple[int, ...]) -> Tensor:
    """The head's features [n, F] by transformers' implementation of the target."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    states = model.model(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in aux_layers or (-1,)], -1)


def draw_tokens(vocab: int) -> Tensor:
    return torch.randint(3, vocab, (ROWS,), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def draft(head: DraftHead, tokens: Tensor, hidden: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Our own chain: a pass over all rows but the last `steps` - 1 tokens, then one token per pass."""
    first, past = len(tokens) - steps + 1, None
    for start, end in [(0, first), *((i, i + 1) for i in range(first, len(tokens)))]:
        visible = torch.ones(end, end, dtype=torch.bool).tril()[start:]
        state, past = head(head.embed(tokens[start:end]), hidden, torch.arange(start, end), visible, past)
        yield head.logits(state), state
        hidden = state[-1:]


def in_draft_vocabulary(head: DraftHead, logits: Tensor) -> Tensor:
    """vLLM's logits [n, V] on the draft vocabulary [n, D]; all others are -inf."""
    ids = head.to_target(torch.arange(len(head.d2t)))
    others = torch.ones(logits.shape[-1], dtype=torch.bool)
    others[ids] = False
    assert torch.all(logits[:, others] == -torch.inf)
    return logits[:, ids]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Equal within 1e-4 of the root mean square: float32 through a few layers that sum in another order."""
    size = max(1.0, float(wanted.square().mean().sqrt()))
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4 * size)


def compare_drafts(head: DraftHead, target: Path, served: Served) -> None:
    """From tokens through the target, the fusion and a chain of drafts, each side with its own implementation."""
    tokens = draw_tokens(head.config.vocab_size)
    features = served.read(tokens)
    assert_same(features, read_with_transformers(target, tokens, head.aux_layers))

    # The next draft step of EAGLE-2 reads a state without a norm: rounding grows tenfold per step. P-EAGLE has no
    # second step.
    following, steps = tokens.roll(-1), {"eagle2": 2, "eagle3": 3, "peagle": 1}[head.kind]
    with torch.no_grad():
        hidden = head.fuse(features)
    theirs = served.fuse(features)
    start = 0
    for logits, state in draft(head, following, hidden[: ROWS - steps + 1], steps):
        rows = len(state)
        found, found_state = served.step(following[start : start + rows], theirs[:rows], start)
        assert_same(found_state, state)
        assert_same(in_draft_vocabulary(head, found), logits)
        start, theirs = start + rows, found_state[-1:]
    assert start == ROWS
