"""Carries what one call of vLLM's runner finds out to the later calls of the same step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.device_to_host import HostCopy
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.grammar import with_parents


def has_grammar(request: Any) -> bool:
    """Whether a vLLM ``CachedRequestState`` is of a request with a grammar."""
    return request.sampling_params.structured_outputs is not None


@dataclass
class StepState:
    """One step: the runner makes it when the step is prepared, and the engine's later calls of the runner fill it.

    Scheduled ahead, the engine prepares the next step before it takes the drafts of this one.
    """

    batch: RoundBatch
    names: list[str]  # of the requests, in the order of the batch
    in_prompts: np.ndarray  # [b] bool: requests that sample nothing yet, a part of their prompt is left
    with_grammar: list[int]  # places of the requests that have a grammar
    verifies: np.ndarray  # [b] bool: requests that verify a tree
    in_text: bool = False  # whether no row is one of a prompt
    placeholders: int = 0  # for the drafts of each request, where the next step is scheduled ahead
    shape: Shape | None = None  # of these drafts; None where the next step is scheduled after they are drafted
    layers: dict[str, Any] = field(default_factory=dict)  # metadata of the target's forward, by layer
    draws: tuple[SamplingParams, Tensor | None] | None = None  # with the keys [b]; no keys: all take the most likely
    accepted: Accepted | None = None
    parents: tuple[list[str], HostCopy] | None = None  # of drafted nodes, of the requests with a grammar

    @property
    def is_plain(self) -> bool:
        """Whether each request has one row, after its prompt."""
        return self.in_text and not len(self.batch.trees) and max(self.batch.host_lens) == 1

    @property
    def is_greedy(self) -> bool:
        """Whether all requests take the most likely token; known once they have sampled."""
        return self.draws is not None and self.draws[1] is None

    def keep_parents(self, drafts: Drafts) -> None:
        """Keep the links of drafted trees for the scheduler, which follows the grammar of some along them."""
        if self.with_grammar:
            (places,) = to_device([np.array(self.with_grammar)], drafts.tree.parents.device)
            # The scheduler asks when the forward of the next step is queued: its copy must not wait for that.
            parents = HostCopy(drafts.tree.parents[places, 1:])
            self.parents = [self.names[i] for i in self.with_grammar], parents

    def with_links(self, drafts: DraftTokenIds) -> DraftTokenIds:
        """The drafts of this step on the host, with the links that were kept."""
        if self.parents is None:
            return drafts
        names, parents = self.parents
        return with_parents(drafts, dict(zip(names, parents.tolist(), strict=True)))

    def chains(self) -> Tensor | None:
        """The requests with a grammar [b] bool; None without any."""
        if not self.with_grammar:
            return None
        chains = np.zeros(self.batch.b)
        chains[self.with_grammar] = 1
        return to_device([chains], self.batch.starts.device)[0] > 0
