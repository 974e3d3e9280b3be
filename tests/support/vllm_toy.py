"""Our runner for vLLM on small models, without an engine: a head with one layer of real tree attention over a paged
cache, and a target whose logits and states are random and whose cache is real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.attention import TreeAttentionImpl, TreeMetadata
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.cache_layout import slot_table
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.deferred_extend import DeferredTokens
from eagle_plugin.vllm.drafter import TreeProposer
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.linear_step import LinearStep
from eagle_plugin.vllm.masked_rows import HeadRows
from eagle_plugin.vllm.request_fields import AskedSources
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.sampling import RequestDraws
from eagle_plugin.vllm.shapes import RoundShapes
from eagle_plugin.vllm.step_state import StepState
from eagle_plugin.vllm.verifier import TreeVerifier

V, DRAFT_V, H, D = 256, 128, 32, 16
BLOCK, BLOCKS_EACH, REQUESTS = 8, 12, 8
SHAPE = Shape(3, 4, 16)
CPU = torch.device("cpu")
# Block 0 is vLLM's, and nobody's. The caches of the two models are in groups of their own.
_order = torch.randperm(REQUESTS * BLOCKS_EACH, generator=torch.Generator().manual_seed(5)) + 1
BLOCKS = {"head": _order.view(REQUESTS, -1).int(), "target": _order.flip(0).view(REQUESTS, -1).int()}


def new_cache(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + REQUESTS * BLOCKS_EACH, BLOCK, 2, 2 * D, generator=generator).transpose(1, 2)


class Head(TreeProposer):
    max_num_tokens = 1000

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self._draft_to_target = torch.randperm(V, generator=g)[:DRAFT_V]
        self.method, self._draft_attn_layer_names = "eagle3", {"head"}
        self.model = SimpleNamespace(combine_hidden_states=lambda x: x[:, :H] + x[:, H : 2 * H])  # type: ignore[assignment]
        self.cache, self.attention = new_cache(2), TreeAttentionImpl(4, D, 0.25, 2)
        self.embed, self.qkv = torch.randn(V, H, generator=g), torch.randn(H, 8 * D, generator=g) / 6
        self.out, self.head = torch.randn(4 * D, H, generator=g) / 8, torch.randn(H, DRAFT_V, generator=g)

    def _one_forward(self, rows: HeadRows) -> Any:
        tokens, positions, hidden, metadata = rows
        x = self.embed[tokens.long()] + positions[:, None] * 0.01 + hidden
        q, k, v = (part.reshape(len(x), -1, D) for part in (x @ self.qkv).split([4 * D, 2 * D, 2 * D], dim=1))
        out = self.attention.forward(None, q, k, v, self.cache, metadata, torch.empty_like(q))
        y = (x + out.view(len(x), -1) @ self.out) / 2
        return y, y.roll(1, -1)

    def _logits(self, normed: Tensor) -> Tensor:
        return normed @ self.head

    def prepare_next_token_ids_padded(self, sampled: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """As the engine's kernel, of requests that sampled at least one token."""
        counts = (sampled >= 0).sum(1)
        return sampled.gather(1, counts[:, None] - 1)[:, 0], counts


class ToyRunner:
    """Steps of our runner over requests that always have trees."""

    def __init__(self, head: Head, step: type[DecodeStep] | None) -> None:
        """step: what of is captured later; None: all steps run without graphs."""
        self.head, self.cache = head, new_cache(3)
        groups = [CacheGroup.of("target", [self.cache])]
        runner = self.runner = TreeModelRunner.__new__(TreeModelRunner)
        ranks = RankAgreement(SimpleNamespace(world_size=1), REQUESTS, SHAPE.max_accept_length, CPU)
        linear: Any = SimpleNamespace(names=frozenset(), commit=lambda *_: None, rooms=lambda _: {})
        vars(runner).update(
            _caps=SHAPE,
            device=CPU,
            drafter=head,
            discard_request_mask=SimpleNamespace(gpu=None, np=np.zeros(REQUESTS, dtype=bool)),
            max_num_tokens=REQUESTS * SHAPE.width,
            _copy_valid_sampled_token_count=lambda *_: None,
            _draws=RequestDraws(V, CPU, 0),
            _draft_clock=SimpleNamespace(time=lambda _, call: call(), time_reading=lambda _, call: call()),
            _asked=AskedSources(CPU, chains=False),
            _has_reasoner=False,
            _deferred=DeferredTokens(BLOCK),
            _shapes=RoundShapes(ShapeChooser(SHAPE, None)),
            _store=DraftStore(),
            _step=None,
            _verifier=TreeVerifier(groups, linear, None, "raw_logprobs", ranks),
        )
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int64)
        if step is not None:
            like = torch.zeros(1, V), torch.zeros(1, 3 * H)
            of_linear, tables = LinearStep(linear, {}), {"head": 0, "target": 1}
            runner._step = step(head, groups, SHAPE, like, of_linear, BLOCK * BLOCKS_EACH, tables, ranks)

    def start(self, lengths: Tensor, root: HeadState, roots: Tensor, metadata: Any) -> None:
        """Draft the first trees of all requests, as after their prompts."""
        self.lengths = lengths.clone()
        runner, b = self.runner, len(roots)
        self._plan(list(range(b)), [0] * b, [1] * b)
        state, step = runner._state, runner._step
        assert state is not None
        runner.input_batch.sampling_metadata = metadata
        state.draws = runner._draws.of(metadata, state.names)
        trees = DraftBatch(SHAPE, lengths, state.layers["head"].slot_table, *state.draws, None)
        drafter = step if step is not None and step.can_draft(trees, root) else self.head
        runner._keep(state, drafter.draft_tree(trees, roots, root))

    def drafts(self, requests: list[int]) -> Drafts:
        """The trees that these requests verify next; they keep them."""
        found: list[tuple[Drafts, int]] = [self.runner._store._found[str(i)] for i in requests]
        return Drafts.concatenate([drafts.take(torch.tensor([i])) for drafts, i in found])

    def widths(self, requests: list[int]) -> list[int]:
        """Nodes of the trees that these requests verify next."""
        return [self.runner._store._found[str(i)][0].shape.width for i in requests]

    def step(self, requests: list[int], logits: Tensor, features: Tensor, metadata: Any) -> dict[str, Tensor]:
        """One step of some requests; features [n, 3 * H] and logits [n, V] of the nodes of all trees.

        What it leaves, in own memory.
        """
        runner, widths = self.runner, self.widths(requests)
        self._plan(requests, [width - 1 for width in widths], widths)
        runner.input_batch.sampling_metadata = metadata
        output = runner._sample(logits, None)
        assert runner._state is not None and runner._state.accepted is not None
        kept = {f"accepted.{name}": x.clone() for name, x in runner._state.accepted._asdict().items()}
        drafted = self._propose(output.sampled_token_ids, metadata, *features.split(H, dim=1))
        self.lengths[requests] += kept["accepted.lengths"]
        return kept | {
            "sampled": output.sampled_token_ids,
            "drafted": drafted,
            **{f"tree.{name}": x.clone() for name, x in self.drafts(requests).tree._asdict().items()},
            "head's cache": self._committed("head", self.head.cache),
            "target's cache": self._committed("target", self.cache),
        }

    def _committed(self, name: str, cache: Tensor) -> Tensor:
        """The rows of a cache that the requests' tokens have."""
        rows = [
            cache[blocks.long()].transpose(1, 2).flatten(0, 1)[:length]
            for blocks, length in zip(BLOCKS[name], self.lengths.tolist(), strict=False)
        ]
        return torch.cat(rows)

    def _plan(self, requests: list[int], counts: list[int], lens: list[int]) -> None:
        runner, names, prefixes = self.runner, [str(i) for i in requests], self.lengths[requests]
        states = SimpleNamespace(
            sampling_params=SimpleNamespace(min_tokens=0, structured_outputs=None), num_prompt_tokens=4
        )
        runner.requests = dict.fromkeys(names, states)
        runner.input_batch = SimpleNamespace(  # type: ignore[assignment]
            req_ids=names,
            num_computed_tokens_cpu=prefixes.numpy(),
            vocab_size=V,
            update_async_output_token_ids=lambda: None,
        )
        batch = RoundBatch.read(np.array(counts), np.array(lens), names, prefixes, runner._store)
        runner._store.keep_own()
        longest = int(prefixes.max()) + 2 * SHAPE.width
        tables = {name: slot_table(blocks[requests], BLOCK, longest) for name, blocks in BLOCKS.items()}
        slots = torch.zeros(0, dtype=torch.int64)
        layers = {name: TreeMetadata(batch.rows(), table, slots) for name, table in tables.items()}
        runner._state = StepState(
            batch, names, np.zeros(len(names), dtype=bool), [], np.zeros(len(names), dtype=bool), layers=layers
        )
        if runner._step is not None:
            runner._step.begin(batch, layers)

    def _propose(self, sampled: Tensor, metadata: Any, *parts: Tensor) -> Tensor:
        runner, n = self.runner, len(parts[0])
        assert runner._state is not None
        rows = runner._state.batch
        places = torch.arange(n) - rows.starts.repeat_interleave(rows.lens)
        runner.positions = rows.prefix_lens.repeat_interleave(rows.lens) + places
        runner.input_ids = SimpleNamespace(gpu=torch.zeros(n, dtype=torch.int32))  # type: ignore[assignment]
        step = SimpleNamespace(total_num_scheduled_tokens=n)
        return runner.propose_draft_token_ids(step, sampled, metadata, parts[0], None, list(parts), None, None, None)
