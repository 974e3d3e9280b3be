"""New heads for a target, ready to train: their shape, their frozen parts and where their weights start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import HeadError, Kind
from eagle_plugin.heads.layers import DraftHead
from eagle_plugin.heads.masktoken import choose_mask_token
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.heads.shape import NORM_KEYS, Norms, shape_head
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.heads.targets import choose_kind, default_aux_layers, sglang_ids
from eagle_plugin.heads.vocabulary import check_draft_ids

STD = 0.02


def new_head(
    kind: Kind | Literal["auto"],
    target_dir: str | Path,
    draft_ids: Tensor | None = None,
    *,
    layers: int = 1,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    norms: Norms = "3.1",
    aux_layers: Sequence[int] | None = None,
    init: Literal["target", "random"] = "target",
    mask_token_id: int | None = None,
    seed: int = 0,
) -> DraftHead:
    """Make an untrained head for the target in target_dir, in float32 on the CPU.

    kind "auto" is EAGLE-3 where both engines can serve it on this target, else EAGLE-2. draft_ids [D] int64: the target
    ids of the draft vocabulary, ascending (None: all V; EAGLE-2 always drafts from all). aux_layers: layers whose input
    the head reads (None: 2, L//2, L-3). norms: "3.1" norms each aux state and hands on normed states, "3.0" has neither
    (arXiv 2503.01840), "before_fc" norms the concatenated aux states. EAGLE-2 has no aux layers and no such norms.
    mask_token_id: P-EAGLE's (None: the best unused token).

    init "target" starts lm_head, norms and, where the shapes agree, the layer from the target's last ones, and passes
    the last feature through fc; "random" draws every matrix from N(0, 0.02). The embedding is the target's, frozen, in
    the dtype of its checkpoint; so is EAGLE-2's lm_head, in float32.

    Raises:
        HeadError: the options do not go together or do not fit the target.
    """
    target = TargetFiles(target_dir)
    if kind == "auto":
        kind = choose_kind(target.architecture)
    values = shape_head(
        kind,
        target,
        layers=layers,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    if kind == "eagle2":
        head: DraftHead = Eagle2Head(LlamaConfig(**values))
    else:
        aux = tuple(aux_layers) if aux_layers is not None else default_aux_layers(target.num_layers)
        check_aux_layers(target, aux)
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        check_draft_ids(ids, target.vocab_size)
        values |= NORM_KEYS[norms] | {"draft_vocab_size": len(ids), "target_hidden_size": target.hidden_size}
        if kind == "peagle":
            used = set(ids.tolist()) if len(ids) < target.vocab_size else set()
            values["mask_token_id"] = choose_mask_token(target_dir, used) if mask_token_id is None else mask_token_id
            if not 0 <= values["mask_token_id"] < target.vocab_size:
                raise HeadError(
                    f"mask_token_id is {mask_token_id}, wanted 0 to {target.vocab_size - 1}; name a token of the target"
                )
        head = (PEagleHead if kind == "peagle" else Eagle3Head)(LlamaConfig(**values), aux)
        assert isinstance(head, Eagle3Head)
        head.d2t.copy_(ids - torch.arange(len(ids)))
    _draw(head, torch.Generator().manual_seed(seed))
    if init == "target":
        _start_from_target(head, target)
    head.embedding = nn.Buffer(target.embedding())
    if isinstance(head, Eagle2Head):
        head.lm_head = nn.Buffer(target.lm_head().float())
    return head


def check_aux_layers(target: TargetFiles, aux: tuple[int, ...]) -> None:
    """Raise HeadError unless aux are layers of the target in rising order that SGLang can capture."""
    rising = all(a < b for a, b in zip(aux, aux[1:], strict=False))
    if not aux or not rising or aux[0] < 1 or aux[-1] >= target.num_layers:
        raise HeadError(
            f"aux layers are {list(aux)}, wanted rising ids from 1 to {target.num_layers - 1} for a target with "
            f"{target.num_layers} layers; correct aux_layers"
        )
    sglang_ids(target.architecture, aux, target.num_layers)


@torch.no_grad()
def _draw(head: DraftHead, generator: torch.Generator) -> None:
    """N(0, 0.02) for matrices and the mask's features; norms stay one and the bias of fc zero."""
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, STD, generator=generator)
        elif name == "fc.bias":
            parameter.zero_()


@torch.no_grad()
def _start_from_target(head: DraftHead, target: TargetFiles) -> None:
    hidden = target.hidden_size
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    name = f"layers.{target.num_layers - 1}."
    layer = {part.removeprefix("layers.0."): p for part, p in head.named_parameters() if part.startswith("layers.0.")}
    for part in ("q_proj", "k_proj", "v_proj"):
        # EAGLE-3 reads [embedding; hidden]: the target's layer knows only the second half.
        _copy(layer[f"self_attn.{part}.weight"][:, -hidden:], target.matrix(f"{name}self_attn.{part}.weight"))
    for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        _copy(layer[f"{part}.weight"], target.matrix(f"{name}{part}.weight"))
    # Models with four norms a layer give the one before the MLP its own name.
    before_mlp = target.gain(f"{name}pre_feedforward_layernorm.weight", f"{name}post_attention_layernorm.weight")
    _copy(layer["post_attention_layernorm.weight"], before_mlp)
    if isinstance(head, Eagle3Head):
        _copy(layer["hidden_norm.weight"], target.gain(f"{name}input_layernorm.weight"))
        _copy(head.norm.weight, target.gain("norm.weight"))
        _copy(head.lm_head.weight, target.lm_head()[head.to_target(torch.arange(len(head.d2t)))])


def _copy(parameter: Tensor | nn.Parameter, value: Tensor | None) -> None:
    if value is not None and value.shape == parameter.shape:
        parameter.copy_(value)
