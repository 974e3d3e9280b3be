"""The static memory of a decode step in lanes: what the captured functions read, and leave for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import Proposals, SamplingParams
from eagle_plugin.runtime.graphs import StaticMemory
from eagle_plugin.runtime.round import Drafts, HeadState, TopM, top_m_of


class Root(NamedTuple):
    """What a draft begins with, of b requests."""

    state: HeadState
    lengths: Tensor  # [b] int64: L
    tokens: Tensor  # [b] int64


class Rows(NamedTuple):
    """What one row of every kind looks like."""

    logits: Tensor  # [1, V] of the target
    features: Tensor  # [1, F] of the target, as the head reads them
    state: HeadState  # [1, ...], as sampled requests have it
    drafts: Drafts  # of one sampled request


class StepMemory(StaticMemory):
    """Memory for up to `most` lanes; a name with a dot is a field, as in `put_fields`.

    The lanes of no request are one token long, and have the cache's row 0, which is in the block that vLLM gives to
    nobody.
    """

    def __init__(self, caps: Shape, most: int, rows: Rows, columns: int, tables: Mapping[str, int]) -> None:
        """columns: positions that a request can have in its slots. tables: the KV cache group of some layers."""
        device = rows.logits.device
        super().__init__(device)
        self._caps, self._rows, self._columns = caps, rows, columns
        self._tables = {layer: f"table.{group}" for layer, group in tables.items()}
        for name, fill in (("prefix_lens", 1), ("lengths", 1), ("roots", 0), ("keys", 0)):
            self.allocate(name, most, torch.int64, fill)
        for name in set(self._tables.values()):
            self.allocate(name, most * columns, torch.int32)
        self._greedy = SamplingParams.greedy(most, device)
        self.allocate_fields("sampling", self._greedy)
        self.allocate("logits", most * caps.width * rows.logits.shape[1], torch.float32)
        self.allocate_rows("features", most * caps.width, rows.features)
        self.allocate("accepted.index", most * caps.max_accept_length, torch.int32)
        self.allocate("accepted.lengths", most, torch.int32, 1)
        self.allocate("accepted.tokens", most * caps.max_accept_length, torch.int64)
        for name, like in (*rows.state.top._asdict().items(), ("hidden", rows.state.hidden)):
            self.allocate_rows(f"state.{name}", most, like)
        for part, fields in (("tree", rows.drafts.tree), ("proposals", rows.drafts.proposals)):
            for name, like in fields._asdict().items():
                self.allocate_rows(f"{part}.{name}", most, like)
        self.put_fields("tree", DraftTree.padding(self.view("roots", most), caps.width))

    @property
    def top_dims(self) -> int:
        """Dimensions of the lists that the head leaves: 3 where it lists all levels as it reads."""
        return self._rows.state.top.logp.dim()

    # What the functions read of all lanes.

    def table(self, layer: str, lanes: int) -> Tensor:
        """The slots of this layer's cache, [lanes, columns] int32."""
        return self.view(self._tables[layer], lanes, self._columns)

    def logits(self, lanes: int) -> Tensor:
        """[lanes * W, V] float32."""
        return self.view("logits", lanes * self._caps.width, self._rows.logits.shape[1])

    def features(self, lanes: int) -> Tensor:
        """[lanes * W, F]."""
        return self.view("features", lanes * self._caps.width, self._rows.features.shape[1])

    def drafts(self, lanes: int, is_greedy: bool) -> Drafts:
        """The trees; greedy ones have no proposals."""
        tree = self.view_fields("tree", DraftTree, lanes, self._caps.width)
        if is_greedy:
            return Drafts(tree, Proposals.none(lanes, tree.tokens.device), self._caps)
        shape = self.proposal_shape(is_greedy)
        return Drafts(tree, self.view_fields("proposals", Proposals, lanes, *shape), self._caps)

    def proposal_shape(self, is_greedy: bool) -> torch.Size:
        """Rows and tokens of the proposals of a request."""
        return torch.Size([0, 0]) if is_greedy else self._rows.drafts.proposals.tokens.shape[1:]

    def accepted(self, lanes: int) -> Accepted:
        """The accepted paths."""
        index, tokens = (
            self.view(f"accepted.{name}", lanes, self._caps.max_accept_length) for name in ("index", "tokens")
        )
        return Accepted(index, self.view("accepted.lengths", lanes), tokens)

    def root(self, lanes: int, is_greedy: bool) -> Root:
        """What the head left."""
        likely, hidden = self._rows.state
        *levels, most = likely.logp.shape[1:]
        top_m = min(top_m_of(self._caps, is_greedy), most)
        top = self.view_fields("state", TopM, lanes, *levels, top_m)
        state = HeadState(top, self.view("state.hidden", lanes, *hidden.shape[1:]))
        return Root(state, self.view("lengths", lanes), self.view("roots", lanes))

    def draws(self, lanes: int, is_greedy: bool) -> tuple[SamplingParams, Tensor | None]:
        """How tokens are drawn, and the keys."""
        if is_greedy:
            return self._greedy.rows(slice(lanes)), None
        return self.view_fields("sampling", SamplingParams, lanes), self.view("keys", lanes)

    # What is put for the requests of a step.

    def put_table(self, layer: str, slots: Tensor, b: int, lanes: int) -> None:
        """Put the slots [b, S] int32 of b requests in this layer's cache."""
        table = self.table(layer, lanes)
        table[:b, : slots.shape[1]] = slots[:b, : self._columns]
        if lanes > b:  # as far as anything is read from or written to a lane of one token
            table[b:, : 2 + self._caps.max_accept_length + self._caps.reach] = 0

    def put_lanes(self, name: str, values: Tensor, lanes: int, otherwise: int) -> None:
        """Put the values of the first lanes, [b, ...]; those after them get `otherwise`."""
        self.put(name, values)
        if lanes > len(values):
            self.view(name, lanes, *values.shape[1:])[len(values) :] = otherwise

    def put_trees(self, tree: DraftTree, lanes: int) -> None:
        """Put trees that were not drafted in this memory.

        What is left in the other lanes may name proposals of an earlier step, which those of this one need not have.
        """
        self.put_fields("tree", tree)
        if lanes > len(tree.draws):
            self.view("tree.draws", lanes, self._caps.width)[len(tree.draws) :] = -1

    def put_accepted(self, accepted: Accepted, lanes: int) -> None:
        """Put paths that were not walked in this memory."""
        for name, values in accepted._asdict().items():
            self.put_lanes(f"accepted.{name}", values, lanes, 1 if name == "lengths" else 0)

    def put_root(self, root: Root, lanes: int) -> None:
        """Put what the head left."""
        (top, hidden), lengths, tokens = root
        self.put_fields("state", top)
        self.put("state.hidden", hidden)
        self.put_lanes("lengths", lengths, lanes, 1)
        self.put_lanes("roots", tokens, lanes, 0)

    def put_draws(self, sampling: SamplingParams, keys: Tensor | None) -> None:
        """Put how requests draw; without keys all take the most likely token, whatever is there."""
        if keys is not None:
            self.put_fields("sampling", sampling)
            self.put("keys", keys)
