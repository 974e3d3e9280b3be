"""Runs a decode step by four functions over static memory, which graphs can replay: verify, walk, extend, draft.

They serve steps in which every request verifies a tree of the caps (verify, walk, extend), and steps after which trees
of the caps are drafted for all requests (draft). What else a step does, and every other step, runs without graphs of
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import read_path
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.captured_rounds import Around, CapturedRounds, FunctionKey
from eagle_plugin.runtime.graphs import Capturer
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts, HeadState, TreeRows, accept
from eagle_plugin.runtime.round_memory import OneRequest
from eagle_plugin.vllm.accepted_tokens import CacheGroup, output_tokens
from eagle_plugin.vllm.attention import Rows, TreeMetadata
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.drafter import DraftBatch, PathBatch, TreeProposer
from eagle_plugin.vllm.step_memory import Root, StepMemory


class TargetForward(NamedTuple):
    """The forward of the target, which the engine has prepared in memory of its own."""

    run: Callable[[dict[str, TreeMetadata], Tensor, Tensor], Any]  # of metadata by layer, tokens [N], positions [N]
    tokens: Tensor  # [most] int32, at a fixed address; past the rows of a step there may be anything
    positions: Tensor  # [most] int64, the same
    layers: Mapping[str, Sequence[str]]  # of the target, by the layer that stands for their group of caches


class DecodeStep(CapturedRounds[StepMemory]):
    """The functions of a step; what is in the rows of a padded batch that are padding does not matter.

    Drafted trees are overwritten after the step that verifies them.
    """

    def __init__(
        self,
        drafter: TreeProposer,
        groups: Sequence[CacheGroup],
        caps: Shape,
        target: tuple[Tensor, Tensor],
        columns: int,
        tables: Mapping[str, int],
        ranks: RankAgreement,
        forward: TargetForward | None = None,
        synthetic: SyntheticRates | None = None,
    ) -> None:
        """target: its logits [1, V] and states [1, F] of one row. columns: positions that a request can have in its
        slots. tables: the KV cache group of a layer of each of `groups`, and of the head's. forward: None where the
        engine runs the target. synthetic: as of `round.accept`."""
        super().__init__()
        self._drafter, self._groups, self._caps = drafter, groups, caps
        self._target, self._columns, self._tables = target, columns, tables
        self._ranks, self._forward, self._synthetic = ranks, forward, synthetic
        self._head_layer = next(name for name in tables if name in drafter._draft_attn_layer_names)
        self._step_size: int | None = None  # of the step's padded batch; None: no graphs for so many requests

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of the rounds that what was captured serves; a plain one has no function."""
        return PLAIN, self._caps

    # A step.

    def begin(self, batch: RoundBatch, layers: Mapping[str, TreeMetadata]) -> None:
        """Copy what the functions read of a step; layers: the metadata of the target's forward, by layer."""
        self._step_size = padded_b = self._buckets.of(batch.b)
        if padded_b is None:
            return
        self._memory.put_padded("prefix_lens", batch.prefix_lens, padded_b, 1)
        for layer in {group: layer for layer, group in self._tables.items()}.values():
            self._memory.put_table(layer, layers[layer].slot_table, batch.b, padded_b)
        if self._has_trees(batch) and not self.holds(batch.drafts):
            self._memory.put_trees(batch.drafts.tree, padded_b)

    def can_verify(self, batch: RoundBatch) -> bool:
        """Whether the target can run over the trees of this step by what was captured."""
        return self._can("verify", None) and self._has_trees(batch)

    def verify(self) -> Any:
        """Run the target over the trees of this step; what it returns, of the rows of the padded batch."""
        return self._replay("verify", None)

    def can_walk(self, batch: RoundBatch, is_greedy: bool) -> bool:
        """Whether the trees of this step can be walked by what was captured."""
        return (
            self._can("walk", is_greedy)
            and self._has_trees(batch)
            and batch.drafts.shape == self._caps
            and batch.drafts.proposals.tokens.shape[1:] == self._memory.proposal_shape(is_greedy)
        )

    def walk(
        self, batch: RoundBatch, logits: Tensor, sampling: SamplingParams, keys: Tensor | None
    ) -> tuple[Accepted, Tensor]:
        """Accept a path of each tree and move its keys and values; logits [b * W, V] are the target's.

        Returns the paths, and in memory of their own the tokens as vLLM takes them.
        """
        if keys is not None and not self.holds(batch.drafts):
            self._memory.put_fields("proposals", batch.drafts.proposals)
        if not self._memory.holds("logits", logits):
            self._memory.put("logits", logits)
        self._memory.put_draws(sampling, keys)
        accepted, tokens = self._replay("walk", keys is None)
        return Accepted(*(values[: batch.b] for values in accepted)), tokens[: batch.b].clone()

    def can_extend(self, batch: RoundBatch, accepted: Accepted, shape: Shape, is_greedy: bool) -> bool:
        """Whether the head can read the accepted paths of this step by what was captured, to draft trees of `shape`."""
        is_path = accepted.tokens.shape[1] == self._caps.max_accept_length
        return self._can("extend", is_greedy) and self._has_trees(batch) and is_path and shape == self._caps

    def extend(self, accepted: Accepted, features: Sequence[Tensor], is_greedy: bool) -> Root:
        """Let the head read the accepted paths of b requests.

        features: the target's states of all nodes in parts [b * W, ...], which the head reads side by side.
        """
        memory, b, padded_b = self._memory, len(accepted.lengths), self._padded_b
        if not memory.holds("accepted.tokens", accepted.tokens):
            memory.put_accepted(accepted, padded_b)
        torch.cat(list(features), dim=-1, out=memory.features(padded_b)[: len(features[0])])
        self._replay("extend", is_greedy)
        return memory.root(b, is_greedy)

    def can_draft(self, batch: DraftBatch, state: HeadState) -> bool:
        """Whether these trees can be drafted by what was captured."""
        if batch.shape != self._caps or batch.chains is not None or not self._can("draft", batch.keys is None):
            return False
        return state.top.logp.dim() == self._memory.top_dims  # else too many rows to list all levels at once

    def draft_tree(self, batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        """As `TreeProposer.draft_tree`; what `extend` left need not be copied."""
        memory, b = self._memory, len(roots)
        if not memory.holds("roots", roots):
            memory.put_root(Root(state, batch.lengths, roots), self._padded_b)
        memory.put_draws(batch.sampling, batch.keys)
        drafts: Drafts = self._replay("draft", batch.keys is None)
        return drafts.first(b)

    def path_sums(self, is_greedy: bool, sums: PathSums, scores: Tensor) -> Tensor:
        """`sums` of the trees that were just drafted, whose scores these are: of b requests, or of the padded batch."""
        if self._step_size is None:
            return sums(scores)
        result: Tensor = self._run(self._key("sums", self._step_size, is_greedy), partial(sums, scores))
        return result

    def holds(self, drafts: Drafts) -> bool:
        """Whether drafts lie in memory that later steps overwrite."""
        return bool(self.sizes()) and self._memory.holds("tree.tokens", drafts.tree.tokens)

    # Captures.

    def capture(self, capturer: Capturer, sizes: list[int], around: Around, with_sums: bool = False) -> None:
        """Capture the functions for these batch sizes, in place of what was captured before.

        around(buckets, size) is the context of the captures of one size; it may drop the size from the buckets.
        with_sums: capture path sums too, which a policy over `shapes` reads.
        """
        self._step_size = None
        like = self._one_request()

        def allocate(most: int) -> StepMemory:
            return StepMemory(self._caps, most, like, self._columns, self._tables)

        self._capture_sizes(sizes, around, allocate, partial(self._capture_size, capturer, with_sums))

    def _capture_size(self, capturer: Capturer, with_sums: bool, padded_b: int) -> None:
        def capture(phase: str, is_greedy: bool | None) -> Any:
            function = self._function(phase, padded_b, is_greedy)
            return self.functions.capture(capturer, self._key(phase, padded_b, is_greedy), function)

        if self._forward is not None and padded_b * self._caps.width <= len(self._forward.tokens):
            capture("verify", None)
        for is_greedy in (True, False):
            scores = capture("draft", is_greedy).scores
            if with_sums:
                sums = partial(self._sums_of(self._caps, scores, self.shapes), scores)
                self.functions.capture(capturer, self._key("sums", padded_b, is_greedy), sums)
            capture("walk", is_greedy)
            capture("extend", is_greedy)

    def _one_request(self) -> OneRequest:
        """What a step of one request leaves; of padding, which has no request."""
        logits, features = self._target
        one = torch.ones(1, dtype=torch.int64, device=logits.device)
        places = torch.arange(1, 1 + self._caps.max_accept_length, device=logits.device)[None]
        table = torch.zeros(1, self._columns, dtype=torch.int32, device=logits.device)
        path = PathBatch(torch.zeros_like(places), places, one - 1, self._chains(one), table)
        state = self._drafter.extend_paths(path, features.repeat(places.shape[1], 1), self._caps, False)
        sampling = SamplingParams.greedy(1, logits.device)
        batch = DraftBatch(self._caps, one, table, sampling, one, None)
        return OneRequest(logits, features, state, self._drafter.draft_tree(batch, one - 1, state))

    # The functions, of the memory alone.

    def _verify(self, padded_b: int, _: bool | None) -> Any:
        memory, width, forward = self._memory, self._caps.width, self._forward
        assert forward is not None
        lengths, tree = memory.view("prefix_lens", padded_b), memory.drafts(padded_b, True).tree
        places = lengths[:, None] + torch.arange(width, device=lengths.device)
        requests = torch.arange(padded_b, device=lengths.device)
        rows = Rows(None, TreeRows(requests, lengths, tree.ancestors, width))
        layers: dict[str, TreeMetadata] = {}
        for first, names in forward.layers.items():
            table = memory.table(first, padded_b)
            layers |= dict.fromkeys(names, TreeMetadata(rows, table, table.gather(1, places).view(-1).long()))
        n = padded_b * width
        return forward.run(layers, forward.tokens[:n].clamp(min=0), forward.positions[:n])

    def _walk(self, padded_b: int, is_greedy: bool) -> tuple[Accepted, Tensor]:
        memory, width = self._memory, self._caps.width
        lengths, (sampling, keys) = memory.view("prefix_lens", padded_b), memory.draws(padded_b, is_greedy)
        drafts = memory.drafts(padded_b, is_greedy)
        accepted = accept(drafts, memory.logits(padded_b), sampling, keys, lengths, "chained", self._synthetic)
        accepted = self._ranks.agree(accepted)
        requests = torch.arange(padded_b, device=lengths.device)
        for group in self._groups:
            group.move_accepted(requests, lengths, width, accepted, memory.table(group.layer, padded_b))
        return memory.put_fields("accepted", accepted), output_tokens(accepted)

    def _extend(self, padded_b: int, is_greedy: bool) -> None:
        memory, lengths = self._memory, self._memory.view("prefix_lens", padded_b)
        accepted = memory.accepted(padded_b)
        path = read_path(accepted, lengths, self._caps.width)
        table = memory.table(self._head_layer, padded_b)
        batch = PathBatch(accepted.tokens, path.positions, path.last, self._chains(lengths), table)
        features = memory.features(padded_b)[path.rows.view(-1)]
        state = self._drafter.extend_paths(batch, features, self._caps, is_greedy)
        memory.put_root(Root(state, lengths + accepted.lengths, path.roots), padded_b)

    def _draft(self, padded_b: int, is_greedy: bool) -> Drafts:
        memory, (sampling, keys) = self._memory, self._memory.draws(padded_b, is_greedy)
        state, lengths, roots = memory.root(padded_b, is_greedy)
        batch = DraftBatch(self._caps, lengths, memory.table(self._head_layer, padded_b), sampling, keys, None)
        drafts = self._drafter.draft_tree(batch, roots, state)
        if not is_greedy:
            drafts = drafts._replace(proposals=memory.put_fields("proposals", drafts.proposals))
        return drafts._replace(tree=memory.put_fields("tree", drafts.tree))

    def _function(self, phase: str, padded_b: int, is_greedy: bool | None) -> Callable[[], Any]:
        functions: dict[str, Callable[..., Any]] = {
            "verify": self._verify, "walk": self._walk, "extend": self._extend, "draft": self._draft,
        }  # fmt: skip
        return partial(functions[phase], padded_b, is_greedy)

    # Parts of them.

    @property
    def _padded_b(self) -> int:
        assert self._step_size is not None
        return self._step_size

    def _has_trees(self, batch: RoundBatch) -> bool:
        return batch.uniform and batch.width == self._caps.width

    def _key(self, phase: str, padded_b: int, is_greedy: bool | None) -> FunctionKey:
        return phase, padded_b, self._caps, is_greedy

    def _can(self, phase: str, is_greedy: bool | None) -> bool:
        return self._step_size is not None and self._key(phase, self._step_size, is_greedy) in self.functions

    def _replay(self, phase: str, is_greedy: bool | None) -> Any:
        """Run a function that was captured for this step."""
        padded_b = self._padded_b
        return self.functions.run(self._key(phase, padded_b, is_greedy), self._function(phase, padded_b, is_greedy))

    def _chains(self, lengths: Tensor) -> TreeRows:
        """The places of paths as query rows, each of which sees the places before it."""
        longest, device = self._caps.max_accept_length, lengths.device
        ancestors = chain_ancestors(longest, device).repeat(len(lengths), 1)
        return TreeRows(torch.arange(len(lengths), device=device), lengths, ancestors, longest)


def side_by_side(features: Sequence[Tensor]) -> Tensor:
    """The target's states as the head reads them, of parts [N, ...]."""
    return features[0] if len(features) == 1 else torch.cat(list(features), dim=-1)
