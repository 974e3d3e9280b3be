"""Grows the candidates of a round level by level: what both engines' drafters do with the head's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.policy import NUM_SAMPLED
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree, Frontier
from eagle_plugin.engines.numbers import no_proposals
from eagle_plugin.kernels.sampling import Proposals, SamplingParams, propose
from eagle_plugin.kernels.tree import grow_level, new_table, select_tree


class Growth:
    """The candidates of one round of b requests, and the distributions that the sampled ones were drawn from.

    A node has shape.topk deterministic children; in a batch with sampling requests it has sampled ones too.
    """

    def __init__(
        self,
        shape: Shape,
        sampling: SamplingParams,
        numbers: Tensor | None,
        draft_to_target: Tensor | None,
        chains: Tensor | None = None,
    ) -> None:
        """sampling has one row for each of b requests; numbers [b, P, S] (None: all requests are greedy).

        draft_to_target [draft vocabulary] int64 maps to target ids (None: the same ids). chains [b] bool marks requests
        whose nodes get one child only, the likeliest; they must be greedy in `sampling`.
        """
        self._shape, self._sampling, self._numbers = shape, sampling, numbers
        self._draft_to_target, self._chains = draft_to_target, chains
        self._children = shape.topk if numbers is None else shape.topk + NUM_SAMPLED
        self._b = len(sampling.temperatures)
        rows = 1 + shape.draft_slots  # that propose children
        self.table: CandidateTable = new_table(self._b, rows * self._children, sampling.temperatures.device)
        self._drawn: list[tuple[Tensor, Tensor]] = []

    def add_level(self, level: int, logp: Tensor, index: Tensor, previous: Frontier | None) -> Frontier:
        """Propose the children of a frontier (None: of the root) from the head's best tokens [b * F, M] there.

        Returns the frontier of the next level, which has no rows behind the last level.
        """
        topk = self._shape.topk
        rows = len(logp) // self._b
        first = 0 if previous is None else 1 + (level - 2) * topk  # proposal row of the frontier's first node
        shape = (self._b, rows, self._children)
        draws = None
        if self._numbers is None:
            logp, tokens = logp[:, :topk].contiguous(), index[:, :topk].contiguous()
            tokens = tokens if self._draft_to_target is None else self._draft_to_target[tokens]
        else:
            logp, tokens, draws, *q = propose(
                logp,
                index,
                self._sampling.for_rows(rows),
                self._numbers[:, first : first + rows].reshape(-1, NUM_SAMPLED).contiguous(),
                topk,
                first_row=first,
                rows_per_request=rows,
                draft_to_target=self._draft_to_target,
            )
            self._drawn.append((q[0].view(self._b, rows, -1), q[1].view(self._b, rows, -1)))
            draws = draws.view(shape)
        logp = logp.view(shape)
        if self._chains is not None:
            logp[:, :, 1:] = logp[:, :, 1:].masked_fill(self._chains[:, None, None], -torch.inf)
        beam = topk if level < self._shape.steps else 0
        offset = first * self._children
        return grow_level(self.table, offset, level, logp, tokens.view(shape), previous, beam, draws)

    def select(self, root_tokens: Tensor) -> DraftTree:
        """The best nodes as one tree a request; root_tokens [b] int64."""
        return select_tree(self.table, root_tokens, self._shape.width)

    def proposals(self) -> Proposals:
        """The distributions of all levels, by proposal row."""
        if self._numbers is None:
            return no_proposals(self._b, self.table.scores.device)
        return Proposals(*(torch.cat(parts, dim=1) for parts in zip(*self._drawn, strict=True)))
