"""Adds the masked rows of a P-EAGLE head to the forward in which it reads accepted tokens.

vLLM's own class for such heads keeps what they read under one flag only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Levels
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.heads.files import MASK_KEYS, HeadError, check_mask_token, read_mask_token
from eagle_plugin.runtime.parallel_levels import MaskedRows, MaskRow
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm.attention import Rows, TreeMetadata


def mask_token(speculative_config: Any) -> int | None:
    """The id that masked rows read if the head of a vLLM ``SpeculativeConfig`` is a P-EAGLE head, else None.

    Raises:
        HeadError: it is not an id of the target; or the flag parallel_drafting is given for a head of another kind.
    """
    draft, head = speculative_config.draft_model_config, speculative_config.model
    keys = {key: getattr(draft.hf_config, key, None) for key in MASK_KEYS}
    token = read_mask_token(keys, head) if speculative_config.method == "eagle3" else None
    if token is None:
        if speculative_config.parallel_drafting:
            raise HeadError(
                f"--speculative-config has parallel_drafting true and the draft head {head}, wanted a P-EAGLE head: "
                f"method eagle3, and {', '.join(MASK_KEYS[:-1])} or {MASK_KEYS[-1]} in its config.json; remove "
                "parallel_drafting for an EAGLE head"
            )
        return None
    return check_mask_token(token, draft.get_vocab_size(), f"{head} has mask_token_id")


def configured_levels(speculative_config: Any) -> Levels:
    """How the head of a vLLM ``SpeculativeConfig`` drafts levels; errors as of `mask_token`."""
    return Levels.RECURRENT if mask_token(speculative_config) is None else Levels.PARALLEL


@contextmanager
def keeping_the_mask(speculative_config: Any) -> Iterator[None]:
    """Let vLLM's class for EAGLE-3 heads have the tensor mask_hidden of the head that is loaded inside.

    The flag is off before and after: with it vLLM plans a chain's masked rows into every step, which takes room of the
    step's tokens, and its proposer drafts such chains.
    """
    speculative_config.parallel_drafting = True
    try:
        yield
    finally:
        speculative_config.parallel_drafting = False


@torch.no_grad()
def mask_row(model: Any, token: int) -> MaskRow:
    """What masked rows read, of a head that was loaded inside `keeping_the_mask`."""
    return MaskRow(token, model.combine_hidden_states(model.mask_hidden))


class HeadRows(NamedTuple):
    """What one forward of the head reads."""

    tokens: Tensor  # [r] int32
    positions: Tensor  # [r] int64
    hidden: Tensor  # [r, H]; [r, 0] where the head reads tokens alone
    metadata: TreeMetadata


def in_slices(rows: HeadRows, most: int) -> list[HeadRows]:
    """The rows of whole requests in parts of at most `most` rows, which is what the engine compiles the head for.

    Only rows of trees alone, n of each request, can be more: b requests draft b * topk rows per level, and a step has
    no more than `most` rows. A request's rows attend to nothing of the others.
    """
    tokens, positions, hidden, metadata = rows
    extend, tree, query, _ = metadata.rows
    if len(tokens) <= most or extend is not None or tree is None or query is not None:
        return [rows]
    b, n = tree.ancestors.shape
    count = max(most // n, 1)
    slices = []
    for first in range(0, b, count):
        own, part = slice(first, first + count), slice(first * n, (first + count) * n)
        of_tree = TreeRows(tree.requests[own], tree.prefix_lens[own], tree.ancestors[own], tree.tail)
        data = TreeMetadata(Rows(None, of_tree), metadata.slot_table, metadata.slots[part])
        slices.append(HeadRows(tokens[part], positions[part], hidden[part], data))
    return slices


def after_tokens(masked: MaskedRows, read: HeadRows, last: Tensor, lengths: Tensor) -> tuple[HeadRows, Tensor]:
    """Consecutive tokens of b requests, and after them the masked rows of each: for a step of any kind.

    last [b]: each request's last row that counts; lengths [b]: L. Returns all rows, and those from which the levels of
    a draft are listed, [b, 1 + masked.rows]: the last token, then the masked rows.

    A row at L or after it has no accepted token. Its keys go to row 0 of the caches, which vLLM gives to nobody:
    they would be in the slots of the masked rows.
    """
    (mask, count), (tokens, positions, hidden, metadata) = masked, read
    table, extend = metadata.slot_table, metadata.rows.extend
    assert extend is not None
    n, device = len(tokens), tokens.device
    owners = extend.requests.repeat_interleave(extend.lens, output_size=n)
    places = lengths[:, None] + torch.arange(count, device=device)
    query = torch.arange(n, n + places.numel(), device=device)
    requests = torch.arange(len(lengths), device=device)
    tree = TreeRows(requests, lengths, chain_ancestors(count, device).repeat(len(lengths), 1), count)
    kept = metadata.slots.where(positions < lengths[owners], 0)
    rows = HeadRows(
        torch.cat([tokens, torch.full_like(query, mask.token, dtype=tokens.dtype)]),
        torch.cat([positions, places.view(-1)]),
        torch.cat([hidden, mask.hidden.expand(len(query), -1)]),
        TreeMetadata(
            metadata.rows._replace(tree=tree, query=query),
            table,
            torch.cat([kept, table.gather(1, places).view(-1).long()]),
        ),
    )
    return rows, torch.cat([last[:, None], query.view(places.shape)], dim=1)


def after_paths(masked: MaskedRows, read: HeadRows, last: Tensor) -> tuple[HeadRows, Tensor]:
    """As `after_tokens`, of b requests with E places each (`drafter.PathBatch`), without a number of the host.

    Of each request the masked rows come after all places, and in the caches after its accepted tokens.
    """
    (mask, count), (tokens, positions, hidden, metadata) = masked, read
    table, rows = metadata.slot_table, metadata.rows.tree
    assert rows is not None
    device, (b, longest) = tokens.device, rows.ancestors.shape
    requests, order = torch.arange(b, device=device)[:, None], torch.arange(count, device=device)
    kept = last[:, None] - requests * longest + 1  # accepted tokens
    places = kept + order
    own = rows.prefix_lens[:, None] + places
    slots = metadata.slots.view(b, longest).where(torch.arange(longest, device=device) < kept, 0)

    def side_by_side(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first.view(b, longest, *first.shape[1:]), second], dim=1).flatten(0, 1)

    seen = (torch.ones_like(places) << places + 1) - 1  # the accepted tokens, the masked rows before, and itself
    tree = rows._replace(ancestors=torch.cat([rows.ancestors, seen], dim=1), tail=longest + count)
    made = HeadRows(
        side_by_side(tokens, torch.full_like(places, mask.token, dtype=tokens.dtype)),
        side_by_side(positions, own),
        side_by_side(hidden, mask.hidden.expand(b, count, -1)),
        TreeMetadata(Rows(None, tree), table, side_by_side(slots.view(-1), table.gather(1, own).long())),
    )
    begins = requests * (longest + count)
    return made, torch.cat([begins + kept - 1, begins + longest + order], dim=1)
