"""Holds what the captured functions of a decode step read of vLLM's batch, and what they leave for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.round import HeadState, top_m_of
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

    def __init__(
        self, caps: Shape, most: int, like: OneRequest, columns: int, tables: Mapping[str, int], rows: int | None = None
    ) -> None:
        """columns: positions that a request can have in its slots. tables: the KV cache group of some layers. rows: as
        of `RoundMemory`."""
        super().__init__(caps, most, like, rows)
        device, self._columns = like.logits.device, columns
        self._tables = {layer: f"table.{group}" for layer, group in tables.items()}
        for name, fill in (("prefix_lens", 1), ("lengths", 1), ("rng_keys", 0), ("lookup_rows", 0)):
            self.allocate(name, most, torch.int64, fill)
        for name in set(self._tables.values()):
            self.allocate(name, most * columns, torch.int32)
        self._greedy = SamplingParams.greedy(most, device)
        self.allocate_fields("sampling", self._greedy)

    def put_no_trees(self, padded_b: int, width: int) -> None:
        """Put trees of a root alone."""
        self.put_fields("tree", DraftTree.padding(self.view("roots", padded_b), width))

    # What the functions read of the padded batch.

    def table(self, layer: str, padded_b: int) -> Tensor:
        """The slots of this layer's cache, [padded_b, columns] int32."""
        return self.view(self._tables[layer], padded_b, self._columns)

    def root(self, padded_b: int, is_greedy: bool) -> Root:
        """What the head left, for a draft of any shape."""
        state = self.state(padded_b, self.list_shape(is_greedy)[-1])
        return Root(state, self.view("lengths", padded_b), self.view("roots", padded_b))

    def list_shape(self, is_greedy: bool) -> torch.Size:
        """Of the lists that the head leaves for a request: tokens, after levels where it lists all as it reads."""
        *levels, most = self._like.state.top.logp.shape[1:]
        return torch.Size([*levels, min(top_m_of(self._caps, is_greedy), most)])

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

        The padding gets roots alone: what trees of another width left there are no trees of this one.
        """
        self.put_fields("tree", tree)
        b, width = tree.tokens.shape
        if padded_b > b:
            padding = DraftTree.padding(self.view("roots", padded_b)[b:], width)
            for name, values in padding._asdict().items():
                self.view(f"tree.{name}", padded_b, width)[b:] = values

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
