"""Runs a draft head in vLLM: over what a step of the target accepted, and to draft the next trees, by one forward per
level, in which every node attends to its own ancestors, or, of a head with a mask, by the forward that reads the
accepted tokens, in which masked rows come after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.lora.layers import BaseLayerWithLoRA

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import as_chains
from eagle_plugin.core.verify import Accepted
from eagle_plugin.heads.files import HeadError
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.draft_map import repeated_tokens
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.runtime.parallel_levels import HeadLevels
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, TopM, TreeRows, draft, top_m_of
from eagle_plugin.runtime.startup import SWITCH, StartRefused
from eagle_plugin.vllm import masked_rows
from eagle_plugin.vllm.attention import ExtendRows, Rows, TreeMetadata
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.deferred_extend import DeferredRows
from eagle_plugin.vllm.draft_tables import without_whole_tables
from eagle_plugin.vllm.draft_weights import int8_weights, use_int8_output
from eagle_plugin.vllm.masked_rows import HeadRows
from eagle_plugin.vllm.ranks import tokens_of_engines


class ExtendBatch(NamedTuple):
    """What the head reads after a step of the target: r rows, all prompt rows and the accepted path of each tree.

    EAGLE shifts by one: the row at position j reads token j + 1 and the target's state of position j.
    """

    tokens: Tensor  # [r] int32
    positions: Tensor  # [r] int64
    states: Tensor  # [r] int64: query row of the target whose state is read
    last: Tensor  # [b] int64: each request's last row that counts
    lengths: Tensor  # [b] int64: tokens of each request with keys and values after the step, the next round's L
    rows: ExtendRows
    lens: list[int]  # rows.lens, on the host

    @classmethod
    def after(
        cls, batch: RoundBatch, accepted: Accepted, next_tokens: Tensor, input_ids: Tensor, positions: Tensor
    ) -> ExtendBatch:
        """The rows after a step.

        next_tokens [b]: the token that follows each request's last row; input_ids and positions [N] are the target's.
        """
        device = batch.starts.device
        trees, others = batch.trees, batch.others
        longest = accepted.tokens.shape[1]
        parts, kinds = [], []
        count = sum(batch.other_lens)
        if len(others):
            last = torch.empty(batch.b, dtype=torch.int64, device=device)
            lengths = batch.prefix_lens + batch.lens
            lens = batch.lens[others]
            ends = lens.cumsum(0)
            owners = torch.arange(len(others), device=device).repeat_interleave(lens, output_size=count)
            states = torch.arange(count, device=device) + (batch.starts[others] - ends + lens)[owners]
            tokens = input_ids[(states + 1).clamp(max=len(input_ids) - 1)]
            tokens[ends - 1] = next_tokens[others].to(tokens.dtype)
            last[others] = ends - 1
            parts.append((tokens, positions[states], states))
            kinds.append((others, lengths[others], lens, ends - lens))
        if len(trees):
            t = len(trees)
            path = batch.of_trees(accepted.index).long().clamp(min=0)
            states = batch.query.gather(1, path)
            prefix = batch.of_trees(batch.prefix_lens)
            places = torch.arange(longest, device=device)
            tokens = batch.of_trees(accepted.tokens).to(input_ids.dtype)
            parts.append((tokens.view(-1), (prefix[:, None] + places).view(-1), states.view(-1)))
            starts = count + torch.arange(0, t * longest, longest, device=device)
            kept = batch.of_trees(accepted.lengths).long()
            if len(others):
                last[trees] = starts + kept - 1
                lengths[trees] = prefix + kept
            else:
                last, lengths = starts + kept - 1, prefix + kept
            kinds.append((trees, prefix + longest, torch.full_like(prefix, longest), starts))
        tokens, places, states = (x[0] if len(parts) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
        rows = ExtendRows(*(x[0] if len(kinds) == 1 else torch.cat(x) for x in zip(*kinds, strict=True)))
        return cls(tokens, places, states, last, lengths, rows, [*batch.other_lens, *[longest] * len(trees)])

    def deferred(self, features: Tensor, slot_table: Tensor) -> DeferredRows:
        """The rows as a forward of the head reads them; features [N, F] are the target's states of all query rows."""
        return DeferredRows(self.tokens, self.positions, features[self.states], self.rows, self.lens, slot_table)


class PathBatch(NamedTuple):
    """The same of b requests that all verified trees of one shape: E rows per request, one per place of its path.

    Rows after the end of a path write keys after the new committed length, which the next drafting overwrites.
    """

    tokens: Tensor  # [b, E] int64
    positions: Tensor  # [b, E] int64
    last: Tensor  # [b] int64: each request's last row that counts
    rows: TreeRows  # each place sees the places before it
    slot_table: Tensor  # [b, S] int32


class DraftBatch(NamedTuple):
    """What a drafting reads from b requests; L is a request's committed length, its root comes after it."""

    shape: Shape
    lengths: Tensor  # [b] int64: L
    slot_table: Tensor  # [b, S] int32: row of the head's caches of each position
    sampling: SamplingParams  # of b requests
    rng_keys: Tensor | None  # [b] int64: of the requests' random numbers; None: all requests are greedy
    chains: Tensor | None  # [b] bool: requests whose drafts must be chains; None without any
    rows: Tensor | None = None  # [b] int64: where their branches are looked up; None: nowhere


class CacheGroupsError(UserError):
    """The head's layers have KV caches of several groups."""


def keep_all_keys(layers: Mapping[str, Any], own: AbstractSet[str]) -> None:
    """Give a head with a window caches of the target's kind, where no layer of the target has a window.

    layers: of both models, by name; own: the head's. vLLM would make groups of as many layers as have a window: 31 of
    one layer for a target of 30. The window itself is computed by our attention, which has it on record.
    """
    windows = {name for name, layer in layers.items() if getattr(layer, "sliding_window", None) is not None}
    if windows <= own:
        for name in windows:
            layers[name].sliding_window = None  # read for the kind of the cache alone


class HeadForwards:
    """The forwards of a head that one of vLLM's classes has loaded; a subclass of both gives the attributes."""

    model: Any
    method: str  # of --speculative-config
    vllm_config: Any
    speculative_config: Any
    device: torch.device
    max_num_tokens: int  # rows of a forward
    _draft_attn_layer_names: set[str]  # of the head's layers
    levels = HeadLevels()
    block_rows = 0  # of a request, which a block drafter writes after its tokens
    lookups: Lookups | None = None  # where branches are looked up
    _draft_to_target: Tensor | None = None

    def read_head(self, load: Callable[[], Any]) -> Any:
        """The head, by vLLM's own `load`; what its levels are is known then."""
        token = masked_rows.mask_token(self.speculative_config)
        with without_whole_tables(), int8_weights(self.device.type):
            if token is None:
                return load()
            with masked_rows.keeping_the_mask(self.speculative_config):
                model = load()
        self.levels = HeadLevels(masked_rows.mask_row(model, token))
        return model

    def complete_head(self) -> None:
        """Read the map from draft to target tokens, once vLLM has given the head what it shares with the target.

        Raises:
            StartRefused: the map names a token twice; vLLM's own worker cannot take over any more.
        """
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            # A layer shared with a target that serves LoRA would select adapters by the target's rows.
            if isinstance(module, BaseLayerWithLoRA):
                parent, _, own_name = name.rpartition(".")
                setattr(self.model.get_submodule(parent), own_name, module.base_layer)
        keep_all_keys(self.vllm_config.compilation_config.static_forward_context, self._draft_attn_layer_names)
        use_int8_output(self.model)
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        self._draft_to_target = None
        if offsets is not None:
            self._draft_to_target = torch.arange(len(offsets), device=offsets.device) + offsets.data
        for reason in repeated_tokens(self._draft_to_target):
            raise StartRefused(HeadError(f"{reason}, or serve this head with {SWITCH}=0"))

    def check_cache_groups(self, groups: Sequence[Any]) -> None:
        """Refuse a head whose layers have caches in several of vLLM's ``KVCacheGroupSpec``.

        Raises:
            CacheGroupsError: they have: all rows of the head have one block table.
        """
        own = self._draft_attn_layer_names
        found = sum(not own.isdisjoint(group.layer_names) for group in groups)
        if found > 1:
            raise CacheGroupsError(
                f"vLLM put the KV caches of the head's {len(own)} layers into {found} groups, and a "
                "head is served from one; add --disable-hybrid-kv-cache-manager (layers with sliding windows then keep "
                "all tokens), or serve a head with fewer layers"
            )

    def extend(self, batch: ExtendBatch, features: Tensor, slot_table: Tensor, shape: Shape, greedy: bool) -> HeadState:
        """Feed a step's tokens to the head and list the most likely children of the next roots.

        features [N, F] are the target's states of all its query rows. A head with masked rows lists all levels of
        `shape`, where the forward has room for them.
        """
        deferred, rows = batch.deferred(features, slot_table), batch.last[:, None]
        read, masked = self._rows_of(deferred), self.levels.masked_rows(shape)
        if masked is not None and len(read.tokens) + len(rows) * masked.rows <= self.max_num_tokens:
            read, rows = masked_rows.after_tokens(masked, read, batch.last, batch.lengths)
        return self._most_likely(read, rows, top_m_of(shape, greedy))

    def extend_paths(self, batch: PathBatch, features: Tensor, shape: Shape, greedy: bool) -> HeadState:
        """`extend` without a number of the host; features [b * E, F] are the target's states of the accepted nodes."""
        slots = batch.slot_table.gather(1, batch.positions).long().view(-1)
        metadata = TreeMetadata(Rows(None, batch.rows), batch.slot_table, slots)
        read = HeadRows(batch.tokens.view(-1).int(), batch.positions.view(-1), self._combined(features), metadata)
        rows, masked = batch.last[:, None], self.levels.masked_rows(shape)
        if masked is not None:
            read, rows = masked_rows.after_paths(masked, read, batch.last)
        return self._most_likely(read, rows, top_m_of(shape, greedy))

    def masked_rows_per_request(self, shape: Shape) -> int:
        """Rows of a request in `extend_paths` with masked rows; 0 without."""
        masked = self.levels.masked_rows(shape)
        return 0 if masked is None else shape.max_accept_length + masked.rows

    def _most_likely(self, read: HeadRows, rows: Tensor, top_m: int) -> HeadState:
        """What a forward leaves; rows [b, D]: the last accepted token of each request, then its masked rows."""
        normed, hidden = self._forward(read)
        top = TopM.of(self._logits(normed[rows.view(-1)]), top_m)
        if rows.shape[1] > 1:
            top = TopM(*(values.view(*rows.shape, -1) for values in top))
        return HeadState(top, hidden[rows[:, 0]])

    def read_deferred(self, deferred: DeferredRows) -> None:
        """Let the head read tokens from which nothing is drafted, so that its caches have their keys and values."""
        self._forward(self._rows_of(deferred))

    def draft_tree(self, batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        """Draft one tree per request; roots [b] int64 are the last committed tokens."""
        requests = torch.arange(len(roots), device=roots.device)

        def forward(rows: LevelRows) -> tuple[Tensor, Tensor]:
            places = torch.arange(rows.first_slot, rows.tail, device=roots.device)
            slots = batch.slot_table[requests[:, None], batch.lengths[:, None] + places].long().view(-1)
            tree = TreeRows(requests, batch.lengths, rows.ancestors, rows.tail)
            metadata = TreeMetadata(Rows(None, tree), batch.slot_table, slots)
            normed, hidden = self._forward(HeadRows(rows.tokens.int(), rows.positions, rows.hidden, metadata))
            return self._logits(normed), hidden

        top_m = top_m_of(batch.shape, batch.rng_keys is None)
        drafts = draft(
            batch.shape,
            roots,
            self.levels.source(batch.shape, state, batch.lengths, top_m, forward),
            batch.sampling,
            batch.rng_keys,
            batch.lengths,
            self._draft_to_target,
            batch.chains,
            None if self.lookups is None or batch.rows is None else self.lookups.of(batch.rows),
        )
        return drafts if batch.chains is None else drafts._replace(tree=as_chains(drafts.tree, batch.chains))

    def _rows_of(self, deferred: DeferredRows) -> HeadRows:
        """Consecutive tokens of each request, with the target's states of their positions."""
        tokens, positions, features, rows, lens, slot_table = deferred
        owners = rows.requests.repeat_interleave(rows.lens, output_size=len(tokens))
        metadata = TreeMetadata(Rows(rows, None, extend_lens=lens), slot_table, slot_table[owners, positions].long())
        return HeadRows(tokens, positions, self._combined(features), metadata)

    def _combined(self, features: Tensor) -> Tensor:
        """What the head reads of the target's states."""
        return self.model.combine_hidden_states(features) if self.method == "eagle3" else features

    def _forward(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        """The head over r rows: (states that the output layer reads, states that the head reads)."""
        found = [self._one_forward(part) for part in masked_rows.in_slices(rows, self.max_num_tokens)]
        if len(found) == 1:
            return found[0]
        normed, hidden = (torch.cat(states) for states in zip(*found, strict=True))
        return normed, hidden

    def _one_forward(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        tokens, positions, hidden, metadata = rows
        per_layer = dict.fromkeys(self._draft_attn_layer_names, metadata)
        alone = tokens_of_engines(self.vllm_config.parallel_config, len(tokens))
        with set_forward_context(per_layer, self.vllm_config, num_tokens=len(tokens), num_tokens_across_dp=alone):
            found = self.model(input_ids=tokens, positions=positions, hidden_states=hidden, inputs_embeds=None)
        return found if isinstance(found, tuple) else (found, found)  # MTP layers give one state for both

    def _logits(self, normed: Tensor) -> Tensor:
        """The head's logits [r, draft vocabulary] after the rows whose normed states [r, H] these are."""
        if self._draft_to_target is not None:  # compute_logits would spread them over the target's vocabulary
            return self.model.logits_processor(self.model.lm_head, normed)
        return self.model.compute_logits(normed)
