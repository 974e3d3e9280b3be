"""Decoding without an engine: plain, and by draft trees through the plugin's round and kernels.

A batch of requests has one row of the slot table each and never changes. All state is in tensors that stay where they
are, so that every phase of a round can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.heads import Head
from benchmarks.gpu.llama import Cache, Llama, Rows
from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import AcceptedPath, read_path
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.accept import accept
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, RecurrentLevels, TopM, TreeRows, draft, top_m_of


def new_slot_table(batch: int, positions: int, device: torch.device | str) -> Tensor:
    """Slots in random order: the keys of a request are as scattered as a cache can make them; [b, positions] int32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(batch * positions, generator=generator).view(batch, positions).int().to(device)


class PlainDecoder:
    """Greedy decoding, one token per request and step."""

    def __init__(self, target: Llama, slot_table: Tensor) -> None:
        device = target.device
        self.target = target
        self.batch, self.positions = slot_table.shape
        self.cache = Cache.empty(target.model, slot_table, target.dtype)
        self.requests = torch.arange(self.batch, device=device)
        self.lengths = torch.zeros(self.batch, dtype=torch.int64, device=device)  # L: tokens with keys and values
        self.roots = torch.zeros(self.batch, dtype=torch.int64, device=device)  # the last token of each request
        self.chain = chain_ancestors(MAX_WIDTH, device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read one prompt of at least one token per request; the root is the most likely token after it."""
        for i, prompt in enumerate(prompts):
            tokens = torch.tensor(list(prompt), device=self.target.device)
            features = []
            for first in range(0, len(tokens), MAX_WIDTH):
                part = tokens[first : first + MAX_WIDTH]
                logits, aux = self.target.forward(self.chain_rows(i, first, part), self.cache)
                features.append(aux)
            self.lengths[i] = len(tokens)
            self.roots[i] = logits[-1].argmax()
            self.after_prompt(i, tokens, torch.cat(features))

    def after_prompt(self, request: int, tokens: Tensor, features: Tensor) -> None:
        """Called after each prompt [n] with the aux states [n, 3 * H] at its tokens."""

    def step(self) -> Tensor:
        """Decode one token of each request, [b, 1] int64: the root so far."""
        decoded = self.roots.clone()
        rows = self.rows(self.roots[:, None], self.lengths[:, None], self.chain[:1].expand(self.batch, 1), 0, 1)
        logits, _ = self.target.forward(rows, self.cache)
        self.roots.copy_(logits.argmax(-1))
        self.lengths.add_(1)
        return decoded[:, None]

    def chain_rows(self, request: int, first: int, tokens: Tensor) -> Rows:
        """Consecutive tokens of one request from position `first` on, at most 64."""
        n = len(tokens)
        positions = first + torch.arange(n, device=tokens.device)
        tree = TreeRows(self.requests[request : request + 1], positions[:1], self.chain[None, :n].contiguous(), n)
        return Rows(tokens, positions, self.cache.slot_table[request, positions].long(), tree)

    def rows(self, tokens: Tensor, positions: Tensor, ancestors: Tensor, first_slot: int, tail: int) -> Rows:
        """R rows of every request, whose keys go to the slots from L + first_slot on; all tensors [b, R]."""
        n = tokens.shape[1]
        tree = TreeRows(self.requests, self.lengths, ancestors.contiguous(), tail)
        return Rows(tokens.reshape(-1), positions.reshape(-1), self.window(first_slot, n).reshape(-1), tree)

    def window(self, first: int, count: int) -> Tensor:
        """The slots of `count` positions from L + first on, [b, count] int64."""
        positions = self.lengths[:, None] + torch.arange(first, first + count, device=self.lengths.device)
        return self.cache.slot_table.gather(1, positions).long()


class Verified(NamedTuple):
    """What the target says about trees of W nodes."""

    logits: Tensor  # [b * W, V] float32
    features: Tensor  # [b * W, 3 * H]


class Path(NamedTuple):
    """The accepted path of each request."""

    accepted: Accepted
    read: AcceptedPath
    features: Tensor  # [b * E, 3 * H]


class TreeDecoder(PlainDecoder):
    """A round of draft, verify, tail and extend, each a function of the state and of the phase before."""

    def __init__(self, target: Llama, head: Head, slot_table: Tensor, shape: Shape, temperature: float = 0.0) -> None:
        super().__init__(target, slot_table)
        device, b = target.device, self.batch
        self.head, self.shape, self.greedy = head, shape, temperature == 0
        vocabulary = target.model.vocabulary if head.draft_to_target is None else len(head.draft_to_target)
        top_m = min(top_m_of(shape, self.greedy), vocabulary)
        self._top_m = top_m
        self.state = HeadState(
            TopM(torch.zeros(b, top_m, device=device), torch.zeros(b, top_m, dtype=torch.int64, device=device)),
            torch.zeros(b, target.model.hidden, dtype=target.dtype, device=device),
        )
        self.sampling = SamplingParams.of(b, temperature, device=device)
        self.rng_keys = torch.arange(b, device=device)
        self._moves = self.cache.for_moves()

    def after_prompt(self, request: int, tokens: Tensor, features: Tensor) -> None:
        """Let the head read the prompt: its row at position j has token j + 1 and the features of position j."""
        following = torch.cat([tokens[1:], self.roots[request : request + 1]])
        for first in range(0, len(tokens), MAX_WIDTH):
            part = slice(first, first + MAX_WIDTH)
            rows = self.chain_rows(request, first, following[part])
            last = torch.tensor([len(rows.tokens) - 1], device=tokens.device)
            logits, hidden = self.head.forward(rows, self.head.read(features[part]), last)
        top = TopM.of(logits, self._top_m)
        for kept, value in zip((*self.state.top, self.state.hidden), (*top, hidden), strict=True):
            kept[request] = value[0]

    def draft(self) -> Drafts:
        """Draft one tree per request."""

        def forward(rows: LevelRows) -> tuple[Tensor, Tensor]:
            b, n = rows.ancestors.shape
            tokens, positions = rows.tokens.view(b, n), rows.positions.view(b, n)
            placed = self.rows(tokens, positions, rows.ancestors, rows.first_slot, rows.tail)
            return self.head.forward(placed, rows.hidden, None)

        return draft(
            self.shape,
            self.roots,
            RecurrentLevels(self.shape, self.state, self.lengths, self._top_m, forward),
            self.sampling,
            None if self.greedy else self.rng_keys,
            self.lengths,
            self.head.draft_to_target,
        )

    def verify(self, drafts: Drafts) -> Verified:
        """One forward of the target over the nodes."""
        tree, width = drafts.tree, self.shape.width
        rows = self.rows(tree.tokens, self.lengths[:, None] + tree.depths, tree.ancestors, 0, width)
        return Verified(*self.target.forward(rows, self.cache))

    def tail(self, drafts: Drafts, verified: Verified) -> Path:
        """Walk the trees, and move the accepted keys and values."""
        width = self.shape.width
        accepted = accept(drafts, verified.logits, self.sampling, self.rng_keys, self.lengths, "joint")
        self._moves.move_accepted(self.window(0, width).contiguous(), accepted)
        path = read_path(accepted, self.lengths, width)
        return Path(accepted, path, verified.features[path.rows.view(-1)])

    def extend(self, path: Path) -> None:
        """Let the head read the accepted tokens, and make the state that of the next round."""
        tokens, read = path.accepted.tokens, path.read
        b, longest = tokens.shape
        rows = self.rows(tokens, read.positions, self.chain[:longest].expand(b, longest), 0, longest)
        logits, hidden = self.head.forward(rows, self.head.read(path.features), read.last)
        top = TopM.of(logits, self._top_m)
        for kept, value in zip((*self.state.top, self.state.hidden), (*top, hidden), strict=True):
            kept.copy_(value)
        self.roots.copy_(read.roots)
        self.lengths.add_(path.accepted.lengths)

    def round(self) -> Accepted:
        """One round of all requests; the bonus token of each path is the next root."""
        drafts = self.draft()
        path = self.tail(drafts, self.verify(drafts))
        self.extend(path)
        return path.accepted


def plain_text(decoder: PlainDecoder, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The first so many greedy tokens after each prompt."""
    decoder.prefill(prompts)
    return torch.cat([decoder.step() for _ in range(tokens)], 1).tolist()


def tree_text(
    decoder: TreeDecoder, run_round: Callable[[], Accepted], prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[list[list[int]], float]:
    """The same by rounds of trees, and the mean accept length; run_round is `decoder.round` or one that replays it."""
    decoder.prefill(prompts)
    responses = [[root] for root in decoder.roots.tolist()]
    lengths = []
    while min(map(len, responses)) < tokens:
        accepted = run_round()
        for text, new, n in zip(responses, accepted.tokens.tolist(), accepted.lengths.tolist(), strict=True):
            text += new[:n]
            lengths.append(n)
    return [text[:tokens] for text in responses], sum(lengths) / len(lengths)
