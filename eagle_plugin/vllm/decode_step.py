"""A decode step in four functions: verify, walk, extend, draft; over static memory, so that graphs can be captured.

They serve steps in which every request verifies a tree of the caps (verify, walk, extend), and steps after which trees
of the caps are drafted for all requests (draft). What else a step does, and every other step, runs without graphs of
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from eagle_plugin.policy.path_sums import PathSums, children_of
from eagle_plugin.runtime.graphs import Buckets, CapturedFunctions, Capturer
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts, HeadState, TreeRows, accept
from eagle_plugin.vllm.accepted_tokens import CacheGroup, output_tokens
from eagle_plugin.vllm.attention import Rows as QueryRows
from eagle_plugin.vllm.attention import TreeMetadata
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.drafter import DraftBatch, PathBatch, TreeProposer
from eagle_plugin.vllm.step_memory import Root, Rows, StepMemory

Key = tuple[str, int, bool | None]  # a function, lanes, and whether all requests are greedy (None: it does not matter)


class TargetForward(NamedTuple):
    """The forward of the target, which the engine has prepared in memory of its own."""

    run: Callable[[dict[str, TreeMetadata], Tensor, Tensor], Any]  # of metadata by layer, tokens [N], positions [N]
    tokens: Tensor  # [most] int32, at a fixed address; past the rows of a step there may be anything
    positions: Tensor  # [most] int64, the same
    layers: Mapping[str, Sequence[str]]  # of the target, by the layer that stands for their group of caches


class DecodeStep:
    """The functions of a step of up to B requests, in B lanes; what lies in lanes without a request does not matter.

    Results lie in memory that later steps overwrite, the drafted trees after the step that verifies them.
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
        self._drafter, self._groups, self._caps = drafter, groups, caps
        self._target, self._columns, self._tables = target, columns, tables
        self._ranks, self._forward, self._synthetic = ranks, forward, synthetic
        self._head_layer = next(name for name in tables if name in drafter._draft_attn_layer_names)
        self.functions = CapturedFunctions()
        self._buckets = Buckets([])
        self._lanes: int | None = None  # of the step at hand; None: there are no graphs for so many requests
        self._memory: StepMemory
        self._path_sums: dict[int, PathSums] = {}  # by children: the graphs read them

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of the rounds that what was captured serves; a plain one has no function."""
        return PLAIN, self._caps

    def sizes(self) -> list[int]:
        """The batch sizes that were captured, the largest first."""
        return list(self._buckets)

    # A step.

    def begin(self, batch: RoundBatch, layers: Mapping[str, TreeMetadata]) -> None:
        """Copy what the functions read of a step; layers: the metadata of the target's forward, by layer."""
        self._lanes = lanes = self._buckets.of(batch.b)
        if lanes is None:
            return
        self._memory.put_lanes("prefix_lens", batch.prefix_lens, lanes, 1)
        for layer in {group: layer for layer, group in self._tables.items()}.values():
            self._memory.put_table(layer, layers[layer].slot_table, batch.b, lanes)
        if self._has_trees(batch) and not self.holds(batch.drafts):
            self._memory.put_trees(batch.drafts.tree, lanes)

    def can_verify(self, batch: RoundBatch) -> bool:
        """Whether the target can run over the trees of this step by what was captured."""
        return self._is_captured("verify", None) and self._has_trees(batch)

    def verify(self) -> Any:
        """Run the target over the trees of this step; what it returns, of the rows of all lanes."""
        return self._run("verify", None)

    def can_walk(self, batch: RoundBatch, is_greedy: bool) -> bool:
        """Whether the trees of this step can be walked by what was captured."""
        return (
            self._is_captured("walk", is_greedy)
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
        accepted, tokens = self._run("walk", keys is None)
        return Accepted(*(values[: batch.b] for values in accepted)), tokens[: batch.b].clone()

    def can_extend(self, batch: RoundBatch, accepted: Accepted, shape: Shape, is_greedy: bool) -> bool:
        """Whether the head can read the accepted paths of this step by what was captured, to draft trees of `shape`."""
        is_path = accepted.tokens.shape[1] == self._caps.max_accept_length
        return self._is_captured("extend", is_greedy) and self._has_trees(batch) and is_path and shape == self._caps

    def extend(self, accepted: Accepted, features: Sequence[Tensor], is_greedy: bool) -> Root:
        """Let the head read the accepted paths of b requests.

        features: the target's states of all nodes in parts [b * W, ...], which the head reads side by side.
        """
        memory, b, lanes = self._memory, len(accepted.lengths), self._served_lanes
        if not memory.holds("accepted.tokens", accepted.tokens):
            memory.put_accepted(accepted, lanes)
        torch.cat(list(features), dim=-1, out=memory.features(lanes)[: len(features[0])])
        self._run("extend", is_greedy)
        return memory.root(b, is_greedy)

    def can_draft(self, batch: DraftBatch, state: HeadState) -> bool:
        """Whether these trees can be drafted by what was captured."""
        if batch.shape != self._caps or batch.chains is not None or not self._is_captured("draft", batch.keys is None):
            return False
        return state.top.logp.dim() == self._memory.top_dims  # else too many rows to list all levels at once

    def draft_tree(self, batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        """As `TreeProposer.draft_tree`; what `extend` left need not be copied."""
        memory, b = self._memory, len(roots)
        if not memory.holds("roots", roots):
            memory.put_root(Root(state, batch.lengths, roots), self._served_lanes)
        memory.put_draws(batch.sampling, batch.keys)
        drafts: Drafts = self._run("draft", batch.keys is None)
        return drafts.first(b)

    def path_sums(self, is_greedy: bool, sums: PathSums, scores: Tensor) -> Tensor:
        """`sums` of the trees that were just drafted, whose scores these are: of b requests, or of all lanes."""
        if not self._is_captured("sums", is_greedy):
            return sums(scores)
        result: Tensor = self.functions.run(("sums", self._served_lanes, is_greedy), partial(sums, scores))
        return result

    def holds(self, drafts: Drafts) -> bool:
        """Whether drafts lie in memory that later steps overwrite."""
        return bool(self.sizes()) and self._memory.holds("tree.tokens", drafts.tree.tokens)

    # Captures.

    def capture(
        self,
        capturer: Capturer,
        sizes: list[int],
        around: Callable[[Buckets, int], AbstractContextManager[Any]],
        with_sums: bool = False,
    ) -> None:
        """Capture the functions for these batch sizes, in place of what was captured before.

        around(buckets, size) is the context of the captures of one size; it may drop the size from the buckets.
        with_sums: capture path sums too, which a policy over `shapes` reads.
        """
        buckets = Buckets(sizes)
        self.functions.clear()
        self._buckets, self._lanes = Buckets([]), None
        rows = self._one_request()
        for size in list(buckets):
            with around(buckets, size):
                self._memory = StepMemory(self._caps, size, rows, self._columns, self._tables)
            if size in buckets:
                break
        for size in list(buckets):
            with around(buckets, size):
                for key in self._keys(size):
                    result = self.functions.capture(capturer, key, self._function(*key))
                    if with_sums and key[0] == "draft":
                        self.functions.capture(capturer, ("sums", *key[1:]), self._sums_of(result.scores))
        self._buckets = buckets

    def _keys(self, lanes: int) -> list[Key]:
        """What is captured of so many lanes."""
        fits = self._forward is not None and lanes * self._caps.width <= len(self._forward.tokens)
        verify: list[Key] = [("verify", lanes, None)] if fits else []
        return verify + [
            (phase, lanes, is_greedy) for is_greedy in (True, False) for phase in ("draft", "walk", "extend")
        ]

    def _one_request(self) -> Rows:
        """Rows of every kind, of one lane without a request."""
        logits, features = self._target
        one = torch.ones(1, dtype=torch.int64, device=logits.device)
        places = torch.arange(1, 1 + self._caps.max_accept_length, device=logits.device)[None]
        table = torch.zeros(1, self._columns, dtype=torch.int32, device=logits.device)
        path = PathBatch(torch.zeros_like(places), places, one - 1, self._chains(one), table)
        state = self._drafter.extend_paths(path, features.repeat(places.shape[1], 1), self._caps, False)
        sampling = SamplingParams.greedy(1, logits.device)
        batch = DraftBatch(self._caps, one, table, sampling, one, None)
        return Rows(logits, features, state, self._drafter.draft_tree(batch, one - 1, state))

    # The functions, of the memory alone.

    def _verify(self, lanes: int, _: bool | None) -> Any:
        memory, width, forward = self._memory, self._caps.width, self._forward
        assert forward is not None
        lengths, tree = memory.view("prefix_lens", lanes), memory.drafts(lanes, True).tree
        places = lengths[:, None] + torch.arange(width, device=lengths.device)
        requests = torch.arange(lanes, device=lengths.device)
        rows = QueryRows(None, TreeRows(requests, lengths, tree.ancestors, width))
        layers: dict[str, TreeMetadata] = {}
        for first, names in forward.layers.items():
            table = memory.table(first, lanes)
            layers |= dict.fromkeys(names, TreeMetadata(rows, table, table.gather(1, places).view(-1).long()))
        n = lanes * width
        return forward.run(layers, forward.tokens[:n].clamp(min=0), forward.positions[:n])

    def _walk(self, lanes: int, is_greedy: bool) -> tuple[Accepted, Tensor]:
        memory, width = self._memory, self._caps.width
        lengths, (sampling, keys) = memory.view("prefix_lens", lanes), memory.draws(lanes, is_greedy)
        drafts = memory.drafts(lanes, is_greedy)
        accepted = accept(drafts, memory.logits(lanes), sampling, keys, lengths, "chained", self._synthetic)
        accepted = self._ranks.agree(accepted)
        requests = torch.arange(lanes, device=lengths.device)
        for group in self._groups:
            group.move_accepted(requests, lengths, width, accepted, memory.table(group.layer, lanes))
        return memory.put_fields("accepted", accepted), output_tokens(accepted)

    def _extend(self, lanes: int, is_greedy: bool) -> None:
        memory, lengths = self._memory, self._memory.view("prefix_lens", lanes)
        accepted = memory.accepted(lanes)
        path = read_path(accepted, lengths, self._caps.width)
        table = memory.table(self._head_layer, lanes)
        batch = PathBatch(accepted.tokens, path.positions, path.last, self._chains(lengths), table)
        features = memory.features(lanes)[path.rows.view(-1)]
        state = self._drafter.extend_paths(batch, features, self._caps, is_greedy)
        memory.put_root(Root(state, lengths + accepted.lengths, path.roots), lanes)

    def _draft(self, lanes: int, is_greedy: bool) -> Drafts:
        memory, (sampling, keys) = self._memory, self._memory.draws(lanes, is_greedy)
        state, lengths, roots = memory.root(lanes, is_greedy)
        batch = DraftBatch(self._caps, lengths, memory.table(self._head_layer, lanes), sampling, keys, None)
        drafts = self._drafter.draft_tree(batch, roots, state)
        if not is_greedy:
            drafts = drafts._replace(proposals=memory.put_fields("proposals", drafts.proposals))
        return drafts._replace(tree=memory.put_fields("tree", drafts.tree))

    def _sums_of(self, scores: Tensor) -> Callable[[], Tensor]:
        children = children_of(self._caps, scores)
        if children not in self._path_sums:
            self._path_sums[children] = PathSums(self._caps, children, self.shapes, scores.device)
        return partial(self._path_sums[children], scores)

    def _function(self, phase: str, lanes: int, is_greedy: bool | None) -> Callable[[], Any]:
        functions: dict[str, Callable[..., Any]] = {
            "verify": self._verify, "walk": self._walk, "extend": self._extend, "draft": self._draft,
        }  # fmt: skip
        return partial(functions[phase], lanes, is_greedy)

    # Parts of them.

    @property
    def _served_lanes(self) -> int:
        assert self._lanes is not None
        return self._lanes

    def _has_trees(self, batch: RoundBatch) -> bool:
        return batch.uniform and batch.width == self._caps.width

    def _is_captured(self, phase: str, is_greedy: bool | None) -> bool:
        return self._lanes is not None and (phase, self._lanes, is_greedy) in self.functions

    def _run(self, phase: str, is_greedy: bool | None) -> Any:
        key = phase, self._served_lanes, is_greedy
        return self.functions.run(key, self._function(*key))

    def _chains(self, lengths: Tensor) -> TreeRows:
        """The places of paths as query rows, each of which sees the places before it."""
        longest, device = self._caps.max_accept_length, lengths.device
        ancestors = chain_ancestors(longest, device).repeat(len(lengths), 1)
        return TreeRows(torch.arange(len(lengths), device=device), lengths, ancestors, longest)


def side_by_side(features: Sequence[Tensor]) -> Tensor:
    """The target's states as the head reads them, of parts [N, ...]."""
    return features[0] if len(features) == 1 else torch.cat(list(features), dim=-1)
