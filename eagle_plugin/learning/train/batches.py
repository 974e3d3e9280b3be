"""What one training step reads: several documents after each other on one flat token axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from eagle_plugin.learning.data.store.states import expand


class PackedDocument(Protocol):
    """A document of the feature store, or anything with its fields."""

    @property
    def ids(self) -> Tensor:
        """[n] int64."""

    @property
    def mask(self) -> Tensor:
        """[n] bool: response tokens."""

    @property
    def aux(self) -> Tensor | None:
        """[n, F]: the features that the head reads; None for heads that read `last`."""

    @property
    def last(self) -> Tensor:
        """[n, H]: what the target's lm_head reads."""

    @property
    def scales(self) -> Tensor | None:
        """[n, layers] of `aux` and `last` in float8; None where they are no float8."""


@dataclass(frozen=True)
class Batch:
    """N tokens of D documents, without padding. Rows never attend to other documents."""

    ids: Tensor  # [N] int64
    mask: Tensor  # [N] bool, response tokens
    starts: Tensor  # [D + 1] int64: the first row of every document, and N
    aux: Tensor | None  # [N, F], None for heads that read `last`
    last: Tensor  # [N, H]
    scales: Tensor | None = None  # [N, layers] of states that are still in float8, until `expand`

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def bounds(self) -> list[int]:
        """`starts` as Python numbers."""
        return self.starts.tolist()

    @cached_property
    def document(self) -> Tensor:
        """[N] int64: which document a row belongs to."""
        return torch.repeat_interleave(self.starts.diff())

    @cached_property
    def positions(self) -> Tensor:
        """[N] int64: the row's place in its document."""
        return torch.arange(len(self), device=self.ids.device) - self.starts[self.document]

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        held = [self.ids, self.mask, self.starts, self.aux, self.last, self.scales]
        return [tensor for tensor in held if tensor is not None]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        aux, scales = (None if part is None else move(part) for part in (self.aux, self.scales))
        return Batch(move(self.ids), move(self.mask), move(self.starts), aux, move(self.last), scales)

    def expand(self) -> Batch:
        """The same batch with its states in bfloat16, computed on its device."""
        if self.scales is None:
            return self
        aux, last = expand(self.aux, self.last, self.scales)
        return replace(self, aux=aux, last=last, scales=None)


def pack(documents: Sequence[PackedDocument], pinned: bool = False) -> Batch:
    """Put documents after each other.

    pinned: in memory that a GPU copies from by itself; the documents are on the CPU.

    Raises:
        ValueError: there is no document, or some have `aux` or `scales` and others do not.
    """
    aux = [document.aux for document in documents if document.aux is not None]
    if not documents or len(aux) not in (0, len(documents)):
        raise ValueError(f"{len(documents)} documents, {len(aux)} of them with aux hidden states; wanted all or none")
    scales = [document.scales for document in documents if document.scales is not None]
    if len(scales) not in (0, len(documents)):
        raise ValueError(f"{len(documents)} documents, {len(scales)} of them in float8; wanted all or none")
    lengths = torch.tensor([0] + [len(document.ids) for document in documents])
    join = _join_pinned if pinned else torch.cat
    return Batch(
        ids=join([document.ids for document in documents]),
        mask=join([document.mask for document in documents]),
        starts=join([lengths.cumsum(0)]),
        aux=join(aux) if aux else None,
        last=join([document.last for document in documents]),
        scales=join(scales) if scales else None,
    )


def _join_pinned(parts: list[Tensor]) -> Tensor:
    """What torch.cat returns, in pinned memory."""
    rows = sum(len(part) for part in parts)
    place = torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(parts, out=place)


def weigh_chains(batch: Batch, steps: int, prompt_weight: float) -> Tensor:
    """Return the weight of every row at every draft step, [steps, N] float32.

    Row t at step k reads the tokens t+1 .. t+1+k and predicts token t+2+k. Its weight is 1 when all of them are
    response tokens of one document, `prompt_weight` when some belong to the prompt, and 0 past the document's end. So
    the first draft after the prompt counts, and nothing is learnt about what follows the last token.
    """
    n = len(batch)
    weights = torch.zeros(steps, n, device=batch.ids.device)
    response = batch.mask.cumsum(0)  # response tokens up to and including a row: a difference is their number in a span
    for k in range(min(steps, n - 2)):
        rows = n - 2 - k
        same = batch.document[2 + k :] == batch.document[:rows]
        whole = response[2 + k :] - response[:rows] == 2 + k
        weights[k, :rows] = torch.where(whole, 1.0, prompt_weight) * same
    return weights
