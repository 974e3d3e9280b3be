"""Holds what the captured functions of a decode step read of vLLM's batch, and what they leave for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels.sampling import Proposals, SamplingParams
from eagle_plugin.runtime.round import Drafts, HeadState, top_m_of
from eagle_plugin.runtime.round_memory import OneRequest, RoundMemory


class Root(NamedTuple):
    """What a draft begins with, of b requests."""

    state: HeadState
    lengths: Tensor  # [b] int64: L
    tokens: Tensor  # [b] int64


class StepMemory(RoundMemory):
    """Memory for the steps of up to `most` requests.

    The padding of a batch is one token long, and has the cache's row 0, which is in the block that vLLM gives to
    nobody.
    """

    def __init__(self, caps: Shape, most: int, like: OneRequest, columns: int, tables: Mapping[str, int]) -> None:
        """columns: positions that a request can have in its slots. tables: the KV cache group of some layers."""
        super().__init__(caps, most, like)
        device, self._columns = like.logits.device, columns
        self._tables = {layer: f"table.{group}" for layer, group in tables.items()}
        for name, fill in (("prefix_lens", 1), ("lengths", 1), ("rng_keys", 0)):
            self.allocate(name, most, torch.int64, fill)
        for name in set(self._tables.values()):
            self.allocate(name, most * columns, torch.int32)
        self._greedy = SamplingParams.greedy(most, device)
        self.allocate_fields("sampling", self._greedy)
        for name, values in like.drafts.proposals._asdict().items():
            self.allocate_rows(f"proposals.{name}", most, values)
        self.put_fields("tree", DraftTree.padding(self.view("roots", most), caps.width))

    @property
    def top_dims(self) -> int:
        """Dimensions of the lists that the head leaves: 3 where it lists all levels as it reads."""
        return self._like.state.top.logp.dim()

    # What the functions read of the padded batch.

    def table(self, layer: str, padded_b: int) -> Tensor:
        """The slots of this layer's cache, [padded_b, columns] int32."""
        return self.view(self._tables[layer], padded_b, self._columns)

    def drafts(self, padded_b: int, is_greedy: bool) -> Drafts:
        """The trees; greedy ones have no proposals."""
        tree = self.tree(padded_b)
        if is_greedy:
            return Drafts(tree, Proposals.none(padded_b, tree.tokens.device), self._caps)
        shape = self.proposal_shape(is_greedy)
        return Drafts(tree, self.view_fields("proposals", Proposals, padded_b, *shape), self._caps)

    def proposal_shape(self, is_greedy: bool) -> torch.Size:
        """Rows and tokens of the proposals of a request."""
        return torch.Size([0, 0]) if is_greedy else self._like.drafts.proposals.tokens.shape[1:]

    def root(self, padded_b: int, is_greedy: bool) -> Root:
        """What the head left."""
        top_m = min(top_m_of(self._caps, is_greedy), self._like.state.top.logp.shape[-1])
        return Root(self.state(padded_b, top_m), self.view("lengths", padded_b), self.view("roots", padded_b))

    def draws(self, padded_b: int, is_greedy: bool) -> tuple[SamplingParams, Tensor | None]:
        """How tokens are drawn, and the keys."""
        if is_greedy:
            return self._greedy.rows(slice(padded_b)), None
        return self.view_fields("sampling", SamplingParams, padded_b), self.view("rng_keys", padded_b)

    # What is put for the requests of a step.

    def put_table(self, layer: str, slots: Tensor, b: int, padded_b: int) -> None:
        """Put the slots [b, S] int32 of b requests in this layer's cache."""
        table = self.table(layer, padded_b)
        table[:b, : slots.shape[1]] = slots[:b, : self._columns]
        if padded_b > b:  # as far as anything is read from or written to padding of one token
            table[b:, : 2 + self._caps.max_accept_length + self._caps.reach] = 0

    def put_trees(self, tree: DraftTree, padded_b: int) -> None:
        """Put trees that were not drafted in this memory.

        What is left in the padding may name proposals of an earlier step, which those of this one need not have.
        """
        self.put_fields("tree", tree)
        if padded_b > len(tree.draws):
            self.view("tree.draws", padded_b, self._caps.width)[len(tree.draws) :] = -1

    def put_root(self, root: Root, padded_b: int) -> None:
        """Put what the head left."""
        self.put_state(root.state)
        self.put_padded("lengths", root.lengths, padded_b, 1)
        self.put_padded("roots", root.tokens, padded_b, 0)

    def put_draws(self, sampling: SamplingParams, rng_keys: Tensor | None) -> None:
        """Put how requests draw; without keys all take the most likely token, whatever is there."""
        if rng_keys is not None:
            self.put_fields("sampling", sampling)
            self.put("rng_keys", rng_keys)
