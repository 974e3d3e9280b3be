"""What every kind of draft head is and can do; `heads.kinds` lists the kinds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.interpretations import Interpretation
from eagle_plugin.heads.kinds import HeadSpec, find_spec
from eagle_plugin.heads.layers import KeyValues, RMSNorm
from eagle_plugin.heads.new_config import Norms
from eagle_plugin.heads.target_files import TargetFiles

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class StoredHead:
    """A checkpoint of any origin, read and checked as far as its kind does not matter."""

    folder: Path
    config: dict[str, Any]  # config.json with the keys of LlamaConfig
    weights: dict[str, Tensor]  # by canonical name
    interpretation: Interpretation
    target: TargetFiles


@dataclass(frozen=True)
class NewHeadOptions:
    """What `heads.create.new_head` was asked for and only some kinds have."""

    draft_ids: Tensor | None  # [D] int64
    norms: Norms
    aux_layers: tuple[int, ...] | None
    mask_token_id: int | None
    window: int | None = None
    block_size: int | None = None
    causal: bool = False


class Roots(NamedTuple):
    """b places of one text of n + 1 tokens after which a head drafts, and what the text left there."""

    tokens: Tensor  # [b] int64, the last token that is known at each place
    positions: Tensor  # [b] int64, of these tokens, 1 or more
    states: Tensor  # [b, 1, H], from which an EAGLE head drafts the first level
    past: list[KeyValues]  # of the text [b, n, g, D], one per layer


class DraftHead(nn.Module):
    """A draft head.

    Row j of a sequence takes the embedding of token j + 1 together with the target's features of token j, at RoPE
    position j (the shift of EAGLE, arXiv 2401.15077, section 3.1), and predicts token j + 2.

    A norm or lm_head that a kind does not have is None.
    """

    kind: str
    config: LlamaConfig
    fc: nn.Linear
    layers: nn.ModuleList
    aux_layers: tuple[int, ...] = ()  # target layers whose input is the feature; (): the target's last hidden state
    embedding: Tensor  # [V, H], frozen, shared with the target; in the target's dtype or the head's
    own_embedding = False  # whether the embedding is the head's own, which only some engines' classes read
    d2t: Tensor  # [draft vocabulary] int64, offset from a draft id to the target's id
    input_norm: RMSNorm | None  # of all features together
    fc_norm: nn.ModuleList | None  # one RMSNorm for each aux layer's part of the features
    norm: RMSNorm | None  # before lm_head
    norm_output = False  # whether `forward` returns states after `norm`
    window: int | None = None  # keys that a row sees in any layer, its own and the last before it; None: all
    mask_token_id: int | None = None  # the head drafts all levels in one pass over rows of this token
    block_size: int | None = None  # of a block drafter: rows of its block in training, the root's included
    causal = True  # whether rows that are drafted see only those before them; False: a whole block
    stored_biases: frozenset[str] = frozenset()  # biases of a checkpoint that the modules here add

    @property
    def spec(self) -> HeadSpec:
        """The entry of this kind in `heads.kinds`."""
        return find_spec(self.kind)

    @property
    def own_lm_head(self) -> Tensor | None:
        """The parameter lm_head [draft vocabulary, H] where it is the head's own, None where it is the target's."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [..., n] int64, target ids -> [..., n, H] in the dtype of fc."""
        return F.embedding(tokens, self.embedding).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., n, F] -> the hidden states [..., n, H] that `forward` takes for verified tokens."""
        raise NotImplementedError

    def mask_state(self) -> Tensor:
        """The hidden state [1, H] of a row of `mask_token_id`."""
        raise NotImplementedError

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: list[KeyValues] | None = None,
    ) -> tuple[Tensor, list[KeyValues]]:
        """Run the head on n rows.

        embeds, hidden [..., n, H]; positions [..., n] int64; visible [..., n, m + n] bool: which of the m rows of
        `past` and the n rows of this call a row attends to. A draft node must attend to the verified rows, its
        ancestors and itself, as far as they are in the head's window (`in_window`).

        Returns (state [..., n, H], keys and values of all m + n rows per layer). The state of a row is the `hidden` of
        its children.
        """
        raise NotImplementedError

    def read_text(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, list[KeyValues]]:
        """Read a text from its start: tokens [n] int64 are its second one to the last, features [n, F] the target's
        of all but the last. Returns states [n, H] and, per layer, the keys and values of n rows.
        """
        rows = torch.arange(len(tokens), device=tokens.device)
        return self(self.embed(tokens), self.fuse(features), rows, self.in_window(rows, rows).tril())

    def list_levels(self, roots: Roots, steps: int) -> Tensor | None:
        """The states [b, steps, H] from which the levels after each root are drafted, where one pass gives all of them.

        None where a level is drafted from the nodes of the one before.
        """
        return None

    def read_after(self, roots: Roots, tokens: Tensor, hidden: Tensor, seen: Tensor) -> Tensor:
        """The states [b, r, H] of r rows at the positions from each root on, which see the text before the root.

        tokens [b, r] int64; hidden [b, r, H]; seen [r, r] bool: which of these rows see each other.
        """
        b, r = tokens.shape
        positions = roots.positions[:, None] + torch.arange(r, device=tokens.device)
        visible = torch.cat([self.visible_text(roots, positions), seen.expand(b, r, r)], -1)
        states, _ = self(self.embed(tokens), hidden, positions, visible, roots.past)
        return states

    def visible_text(self, roots: Roots, positions: Tensor) -> Tensor:
        """The rows of the text that rows after the roots see: positions [b, rows] -> [b, rows, n] bool."""
        rows = torch.arange(roots.past[0].keys.shape[-3], device=positions.device)
        before = rows < roots.positions[:, None]
        return before[:, None] & self.in_window(positions, rows)

    def in_window(self, positions: Tensor, keys: Tensor) -> Tensor:
        """Which keys are in the window of a row: positions [..., n] of rows, keys [m] -> [..., n, m] bool.

        Of keys at or before the row: a later one is not left out.
        """
        if self.window is None:
            return torch.ones((*positions.shape, len(keys)), dtype=torch.bool, device=positions.device)
        return keys > positions[..., None] - self.window

    def logits(self, state: Tensor) -> Tensor:
        """state [..., n, H] -> [..., n, draft vocabulary]."""
        raise NotImplementedError

    def logits_after(self, state: Tensor, tokens: Tensor) -> Tensor:
        """`logits` of the children of nodes with these tokens [..., n] int64 of the target, which few kinds read."""
        return self.logits(state)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids."""
        return tokens + self.d2t[tokens]

    @classmethod
    def create(cls, values: dict[str, Any], target: TargetFiles, options: NewHeadOptions) -> Self:
        """An untrained head; values: the keys of config.json that all kinds share.

        Raises:
            HeadError: the options do not fit the target.
        """
        raise NotImplementedError

    def start_from_target(self, target: TargetFiles) -> None:
        """Copy what this kind can take from the target beyond the last layer's attention and MLP."""

    def change_vocabulary(self, draft_ids: Tensor, target_lm_head: Tensor) -> int:
        """Let the head draft from other tokens, in place; returns how many of them it had before.

        draft_ids [D] int64 are ascending target ids, target_lm_head [V, H] is the target's. A token that the head had
        keeps its row of lm_head. A new one starts with the target's row, as all rows of a new head do.

        Raises:
            HeadError: the kind always drafts from all tokens, the ids are not ascending ids of the target, or the
                head's hidden size is not the target's.
        """
        raise HeadError(f"this {self.kind} head drafts from all tokens of its target; leave its vocabulary as it is")

    def set_window(self, window: int) -> None:
        """Let a row see so many keys, its own and the last before it.

        Raises:
            HeadError: the engines' classes for this kind have no windows.
        """
        raise HeadError(
            f"a head of kind {self.kind} has no window in the engines, EAGLE-3 and P-EAGLE heads can have one"
        )

    @classmethod
    def continue_head(
        cls, head: DraftHead, target: TargetFiles, layers: int, mask_token_id: int | None, generator: torch.Generator
    ) -> Self:
        """A head of this kind that starts from a trained one of another kind; see `heads.create.continue_as`.

        Raises:
            HeadError: this kind cannot start from that one, or the options do not fit it.
        """
        raise HeadError(
            f"a head of kind {cls.kind} cannot start from one of kind {head.kind}; leave the kind out to train that "
            "head further, or name no head to start from"
        )

    @classmethod
    def adapt_config(cls, config: dict[str, Any], raw: dict[str, Any], speculators: bool) -> None:
        """Give `config`, in place, the keys that config.json (`raw`) leaves to the defaults of its trainer.

        speculators: it was written by the library of that name.
        """

    @classmethod
    def find_unsupported(cls, config: dict[str, Any], weights: dict[str, Tensor]) -> str | None:
        """What of a checkpoint this kind cannot compute, and the fix; None: nothing."""
        return None

    @classmethod
    def from_checkpoint(cls, stored: StoredHead, dtype: torch.dtype | None) -> Self:
        """The head of a checkpoint of any origin, with the target's embedding; dtype as in `fill`.

        Raises:
            HeadError: a tensor is missing or contradicts another.
        """
        raise NotImplementedError

    def config_keys(self, target_dir: str | Path) -> dict[str, Any]:
        """The keys of the exported config.json that this kind has beside those of all heads."""
        return {}

    def stored_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of the exported checkpoint by the names that both engines read, on the CPU."""
        return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.named_parameters()}


def head_class(spec: HeadSpec) -> type[DraftHead]:
    """The torch module of a kind, imported on first use."""
    module, _, name = spec.module.partition(":")
    found: type[DraftHead] = getattr(importlib.import_module(module), name)
    return found
