"""Drafts the trees: one forward of the head a level, every draft node attending to its own ancestors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.v1.spec_decode.eagle import EagleProposer

from eagle_plugin.core.policy import MAX_TOP_M
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import Frontier, as_chains
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.growth import Growth
from eagle_plugin.engines.numbers import draft_numbers
from eagle_plugin.engines.vllm.attention import ExtendRows, Rows, TreeMetadata, TreeRows
from eagle_plugin.engines.vllm.step import Drafts, Step
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.kernels.tree import topk_log_softmax


class Extension(NamedTuple):
    """What the head reads after a step of the target: r rows, all prompt rows and the accepted path of each tree.

    EAGLE shifts by one: the row at position j reads token j + 1 and the target's state of position j.
    """

    tokens: Tensor  # [r] int32
    positions: Tensor  # [r] int64
    states: Tensor  # [r] int64: query row of the target whose state is read
    last: Tensor  # [b] int64: each request's last row that counts
    lengths: Tensor  # [b] int64: committed tokens of each request after the step
    rows: ExtendRows


def plan_extension(
    step: Step, accepted: Accepted, next_tokens: Tensor, input_ids: Tensor, positions: Tensor
) -> Extension:
    """Plan what the head reads.

    next_tokens [b]: the token that follows each request's last row; input_ids and positions [N] are the target's.
    """
    device = step.starts.device
    tree, others = step.trees, step.others
    max_accept_length = accepted.tokens.shape[1]
    last = torch.empty(step.b, dtype=torch.int64, device=device)
    lengths = step.prefix_lens + step.lens
    parts, kinds = [], []
    count = 0
    if len(others):
        lens = step.lens[others]
        ends = lens.cumsum(0)
        count = int(ends[-1]) if step.b > len(others) else len(input_ids)
        owners = torch.arange(len(others), device=device).repeat_interleave(lens, output_size=count)
        states = torch.arange(count, device=device) + (step.starts[others] - ends + lens)[owners]
        tokens = input_ids[(states + 1).clamp(max=len(input_ids) - 1)]
        tokens[ends - 1] = next_tokens[others].to(tokens.dtype)
        last[others] = ends - 1
        parts.append((tokens, positions[states], states))
        kinds.append((others, lengths[others], lens, ends - lens))
    if len(tree):
        t = len(tree)
        path = accepted.index[tree].long().clamp(min=0)
        states = step.query.gather(1, path)
        prefix = step.prefix_lens[tree]
        places = torch.arange(max_accept_length, device=device)
        tokens = accepted.tokens[tree].to(input_ids.dtype)
        parts.append((tokens.view(-1), (prefix[:, None] + places).view(-1), states.view(-1)))
        starts = count + torch.arange(0, t * max_accept_length, max_accept_length, device=device)
        kept = accepted.lengths[tree].long()
        last[tree] = starts + kept - 1
        lengths[tree] = prefix + kept
        kinds.append((tree, prefix + max_accept_length, torch.full_like(prefix, max_accept_length), starts))
    tokens, places, states = (x[0] if len(parts) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
    rows = ExtendRows(*(x[0] if len(kinds) == 1 else torch.cat(x) for x in zip(*kinds, strict=True)))
    return Extension(tokens, places, states, last, lengths, rows)


class TreeProposer(EagleProposer):
    """vLLM's proposer (weights, buffers, warm-up) with our drafting."""

    def load_model(self, target_model: Any) -> None:
        """Load the head as the engine does, and read its map from draft to target tokens."""
        super().load_model(target_model)
        for name, module in list(self.model.named_modules()):
            # A layer shared with a target that serves LoRA would look for adapters by the target's rows.
            if isinstance(module, BaseLayerWithLoRA):
                parent, _, own_name = name.rpartition(".")
                setattr(self.model.get_submodule(parent), own_name, module.base_layer)
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        self._draft_to_target: Tensor | None = None
        if offsets is not None:
            self._draft_to_target = torch.arange(len(offsets), device=offsets.device) + offsets.data

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own drafting yields a chain; a caller of it would get another draft."""
        raise RuntimeError("vLLM called EagleProposer.propose on the plugin's drafter; it drafts by grow()")

    def grow(
        self,
        shape: Shape,
        extension: Extension,
        features: Tensor,
        roots: Tensor,
        metadata: TreeMetadata,
        params: SamplingParams,
        keys: Tensor | None,
        chains: Tensor | None,
    ) -> Drafts:
        """Read a step's tokens, then draft one tree for each of b requests.

        features [N, F] are the target's states of all its query rows, roots [b] int64 the next roots; metadata is that
        of the head's cache group in the target's forward. keys [b] int64 draw the sampled children, None when all
        requests are greedy. chains [b] bool marks the requests whose drafts must be chains.
        """
        hidden = features[extension.states]
        if self.method == "eagle3":
            hidden = self.model.combine_hidden_states(hidden)
        table = metadata.slot_table
        owners = extension.rows.requests.repeat_interleave(extension.rows.lens, output_size=len(extension.tokens))
        slots = table[owners, extension.positions].long()
        rows = Rows(extension.rows, None)
        normed, hidden = self._forward(extension.tokens, extension.positions, hidden, TreeMetadata(rows, table, slots))
        hidden = hidden[extension.last][:, None]  # [b, rows of the previous frontier, H]

        numbers = None if keys is None else draft_numbers(keys, extension.lengths, shape)
        growth = Growth(shape, params, numbers, self._draft_to_target, chains)
        listed = shape.topk if keys is None else MAX_TOP_M
        frontier = growth.add_level(1, *self._list(normed[extension.last], listed), None)
        for level in range(1, shape.steps):
            normed, hidden = self._read_frontier(level, shape, frontier, hidden, extension.lengths, table)
            frontier = growth.add_level(level + 1, *self._list(normed, listed), frontier)
        tree = growth.select(roots)
        if chains is not None:
            tree = as_chains(tree, chains)
        return Drafts(tree, growth.proposals())

    def _read_frontier(
        self, level: int, shape: Shape, frontier: Frontier, hidden: Tensor, lengths: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the head over the frontier of a level: normed states [b * F, H] and states [b, F, H]."""
        b, rows = frontier.tokens.shape
        first = (level - 1) * shape.topk
        requests = torch.arange(b, device=table.device)
        places = lengths[:, None] + torch.arange(first, first + rows, device=table.device)
        slots = table[requests[:, None], places].long().view(-1)
        tree = TreeRows(requests, lengths, frontier.ancestors, first + rows, None)
        parents = frontier.parent_rows[:, :, None].expand(b, rows, hidden.shape[-1])
        normed, states = self._forward(
            frontier.tokens.view(-1).int(),
            (lengths + (level - 1)).repeat_interleave(rows),
            hidden.gather(1, parents).view(b * rows, -1),
            TreeMetadata(Rows(None, tree), table, slots),
        )
        return normed, states.view(b, rows, -1)

    def _forward(
        self, tokens: Tensor, positions: Tensor, hidden: Tensor, metadata: TreeMetadata
    ) -> tuple[Tensor, Tensor]:
        """One forward of the head over r rows: (states that the output layer reads, states that the head reads)."""
        per_layer = dict.fromkeys(self._draft_attn_layer_names, metadata)
        with set_forward_context(per_layer, self.vllm_config, num_tokens=len(tokens)):
            return self.model(input_ids=tokens, positions=positions, hidden_states=hidden, inputs_embeds=None)

    def _list(self, normed: Tensor, listed: int) -> tuple[Tensor, Tensor]:
        """The head's best tokens [r, M] in its own vocabulary, with their log-probabilities."""
        if self._draft_to_target is not None:  # its compute_logits would spread them over the target's vocabulary
            logits = self.model.logits_processor(self.model.lm_head, normed)
        else:
            logits = self.model.compute_logits(normed)
        return topk_log_softmax(logits, min(listed, logits.shape[1]))
