"""The four functions of a decode step over static memory, which graphs can replay: verify, walk, extend, draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import read_path
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.accept import accept
from eagle_plugin.runtime.captured_rounds import CapturedRounds, FunctionKey
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts, TreeRows
from eagle_plugin.runtime.round_memory import OneRequest
from eagle_plugin.vllm.accepted_tokens import CacheGroup, output_tokens
from eagle_plugin.vllm.attention import Rows, TreeMetadata
from eagle_plugin.vllm.head_forwards import DraftBatch, HeadForwards, PathBatch
from eagle_plugin.vllm.linear_step import LinearStep
from eagle_plugin.vllm.step_memory import Root, StepMemory
from eagle_plugin.vllm.target_adapters import TargetAdapters


class TargetForward(NamedTuple):
    """The forward of the target, which the engine has prepared in memory of its own."""

    run: Callable[[dict[str, Any], Tensor, Tensor], Any]  # of metadata by layer, tokens [N], positions [N]
    tokens: Tensor  # [most] int32, at a fixed address; past the rows of a step there may be anything
    positions: Tensor  # [most] or [axes, most] int64, the same
    layers: Mapping[str, Sequence[str]]  # with attention, by the layer that stands for their group of caches
    like: Sequence[Tensor]  # the tensors that it returns, of one row
    adapters: TargetAdapters | None = None  # None: the target serves no LoRA

    def case(self) -> bool | None:
        """Whether the step that the engine has prepared needs the forward with adapters; None: there is only one."""
        return None if self.adapters is None else self.adapters.case()

    def cases(self) -> Sequence[bool | None]:
        """What `case` can be."""
        return (None,) if self.adapters is None else self.adapters.cases

    def ready(self) -> AbstractContextManager[None]:
        """Around all that is `prepared`."""
        return nullcontext() if self.adapters is None else self.adapters.ready()

    def prepared(self, rows: int, case: bool | None) -> AbstractContextManager[None]:
        """With a step of so many rows prepared that needs this case."""
        return nullcontext() if self.adapters is None else self.adapters.selected(rows, bool(case))


class StepFunctions(CapturedRounds[StepMemory]):
    """The functions, each of a padded batch of B requests. They read and write `_memory` alone.

    What is in the rows that are padding does not matter.
    """

    def __init__(
        self,
        drafter: HeadForwards,
        groups: Sequence[CacheGroup],
        caps: Shape,
        target: tuple[Tensor, Tensor],
        linear: LinearStep,
        columns: int,
        tables: Mapping[str, int],
        ranks: RankAgreement,
        forward: TargetForward | None = None,
        synthetic: SyntheticRates | None = None,
    ) -> None:
        """target: its logits [1, V] and states [1, F] of one row. columns: positions that a request can have in its
        slots. tables: the KV cache group of a layer of each of `groups`, and of the head's. forward: None where the
        engine runs the target. synthetic: as of `accept.accept`."""
        super().__init__()
        self._drafter, self._groups, self._caps, self._linear = drafter, groups, caps, linear
        self._target, self._columns, self._tables = target, columns, tables
        self._ranks, self._forward, self._synthetic = ranks, forward, synthetic
        self._head_layer = next(name for name in tables if name in drafter._draft_attn_layer_names)

    def _function(self, key: FunctionKey) -> Callable[[], Any]:
        functions: dict[str, Callable[..., Any]] = {
            "verify": self._verify, "walk": self._walk, "extend": self._extend, "draft": self._draft,
        }  # fmt: skip
        phase, *of = key
        return partial(functions[phase], *of)

    def _verify(self, padded_b: int, width: int, _: bool | None) -> Any:
        """The target over trees of this width; what it returns of B * W rows."""
        memory, forward = self._memory, self._forward
        assert forward is not None
        rows = self._tree_rows(padded_b, width)
        assert rows.tree is not None
        lengths = rows.tree.prefix_lens
        places = lengths[:, None] + torch.arange(width, device=lengths.device)
        layers: dict[str, Any] = {**self._linear.layers(memory, rows, padded_b)}
        for first, names in forward.layers.items():
            table = memory.table(first, padded_b)
            layers |= dict.fromkeys(names, TreeMetadata(rows, table, table.gather(1, places).view(-1).long()))
        n = padded_b * width
        found = forward.run(layers, forward.tokens[:n].clamp(min=0), forward.positions[..., :n])
        # All graphs leave it in the same memory: states of all sizes and widths would take more than 1 GiB.
        values, kind = tree_flatten(found)
        return tree_unflatten([memory.put(f"target.{i}", x) for i, x in enumerate(values)], kind)

    def _walk(self, padded_b: int, shape: Shape, is_greedy: bool) -> tuple[Accepted, Tensor]:
        """Accept a path of each tree of this shape, and move its keys; the paths, and the tokens as vLLM takes them."""
        memory, width = self._memory, shape.width
        lengths, (sampling, rng_keys) = memory.view("prefix_lens", padded_b), memory.draws(padded_b, is_greedy)
        drafts, logits = Drafts(memory.tree(padded_b, width), shape), memory.logits(padded_b, width)
        accepted = accept(drafts, logits, sampling, rng_keys, lengths, "chained", self._synthetic)
        accepted = self._ranks.agree(accepted)
        requests = torch.arange(padded_b, device=lengths.device)
        for group in self._groups:
            group.move_accepted(requests, lengths, width, accepted, memory.table(group.layer, padded_b))
        self._linear.commit(memory, self._tree_rows(padded_b, width), padded_b, accepted)
        return memory.put_fields("accepted", accepted), output_tokens(accepted)

    def _extend(self, padded_b: int, shape: Shape, is_greedy: bool) -> None:
        """Let the head read the paths of trees of this shape, and list what trees of the caps may need."""
        memory, lengths = self._memory, self._memory.view("prefix_lens", padded_b)
        accepted = memory.accepted(padded_b, shape.max_accept_length)
        path = read_path(accepted, lengths, shape.width)
        table = memory.table(self._head_layer, padded_b)
        chains = _chains(lengths, shape.max_accept_length)
        batch = PathBatch(accepted.tokens, path.positions, path.last, chains, table)
        features = memory.features(padded_b, shape.width)[path.rows.view(-1)]
        state = self._drafter.extend_paths(batch, features, self._caps, is_greedy)
        memory.put_root(Root(state, lengths + accepted.lengths, path.roots), padded_b)

    def _draft(self, padded_b: int, shape: Shape, is_greedy: bool) -> Drafts:
        """Draft trees of this shape."""
        memory, (sampling, rng_keys) = self._memory, self._memory.draws(padded_b, is_greedy)
        state, lengths, roots = memory.root(padded_b, is_greedy)
        table, rows = memory.table(self._head_layer, padded_b), memory.view("lookup_rows", padded_b)
        batch = DraftBatch(shape, lengths, table, sampling, rng_keys, None, rows)
        drafts = self._drafter.draft_tree(batch, roots, state)
        return drafts._replace(tree=memory.put_fields("tree", drafts.tree))

    def _tree_rows(self, padded_b: int, width: int) -> Rows:
        """The nodes of trees of this width as all the query rows of a forward."""
        lengths = self._memory.view("prefix_lens", padded_b)
        requests = torch.arange(padded_b, device=lengths.device)
        return Rows(None, TreeRows(requests, lengths, self._memory.tree(padded_b, width).ancestors, width))

    def _one_request(self) -> OneRequest:
        """What a step of one request with trees of the caps leaves; of padding, which has no request."""
        logits, features = self._target
        one = torch.ones(1, dtype=torch.int64, device=logits.device)
        places = torch.arange(1, 1 + self._caps.max_accept_length, device=logits.device)[None]
        table = torch.zeros(1, self._columns, dtype=torch.int32, device=logits.device)
        chains = _chains(one, self._caps.max_accept_length)
        path = PathBatch(torch.zeros_like(places), places, one - 1, chains, table)
        state = self._drafter.extend_paths(path, features.repeat(places.shape[1], 1), self._caps, False)
        sampling = SamplingParams.greedy(1, logits.device)
        batch = DraftBatch(self._caps, one, table, sampling, one, None)
        return OneRequest(logits, features, state, self._drafter.draft_tree(batch, one - 1, state))


def _chains(lengths: Tensor, longest: int) -> TreeRows:
    """The `longest` places of each path as query rows, each of which sees the places before it."""
    device = lengths.device
    ancestors = chain_ancestors(longest, device).repeat(len(lengths), 1)
    return TreeRows(torch.arange(len(lengths), device=device), lengths, ancestors, longest)
