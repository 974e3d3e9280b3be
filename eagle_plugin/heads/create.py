"""New heads for a target, ready to train: their shape, their frozen parts and where their weights start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from eagle_plugin.heads.draft_head import DraftHead, NewHeadOptions, head_class
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.filling import copy_if_alike
from eagle_plugin.heads.kinds import BLOCK_DRAFTERS, find_spec
from eagle_plugin.heads.new_config import Norms, new_head_config
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.heads.target_table import choose_kind

STD = 0.02


def new_head(
    kind: str,
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
    window: int | None = None,
    block_size: int | None = None,
    causal: bool = False,
    seed: int = 0,
) -> DraftHead:
    """Make an untrained head for the target in target_dir, in float32 on the CPU.

    kind: one of `all_kinds`; "auto" is EAGLE-3 where both engines can serve it on this target, else EAGLE-2.
    draft_ids [D] int64: the target ids of the draft vocabulary, ascending (None: all V; EAGLE-2 always drafts from
    all). aux_layers: layers whose input the head reads (None: 2, L//2, L-3). norms: "3.1" norms each aux state and
    gives normed states to the next draft step, "3.0" does neither (arXiv 2503.01840), "before_fc" norms the
    concatenated aux states, "before_fc_output" also gives normed states to the next draft step. EAGLE-2 has no aux
    layers and no such norms.
    mask_token_id: P-EAGLE's and a block drafter's (None: the best unused token). window: `DraftHead.window`; EAGLE-2
    and block drafters have none. block_size, causal: of a block drafter (`DFlashHead`), which has no such norms, and
    where draft_ids is None the target's lm_head.

    init "target" starts lm_head, norms and, where the shapes agree, the layer from the target's last ones, and passes
    the last feature through fc (`start_from_target` of a kind says what else); "random" draws every matrix from
    N(0, 0.02). The embedding is the target's, frozen, in
    the dtype of its checkpoint; so is EAGLE-2's lm_head, in float32.

    Raises:
        HeadError: the options do not go together or do not fit the target.
    """
    target = TargetFiles(target_dir)
    spec = find_spec(choose_kind(target.architecture) if kind == "auto" else kind)
    values = new_head_config(
        spec,
        target,
        layers=layers,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    if spec.kind not in BLOCK_DRAFTERS and (causal or block_size is not None):
        raise HeadError(
            f"a head of kind {spec.kind} drafts no blocks; leave block_size and causal out, or name kind dflash"
        )
    aux = None if aux_layers is None else tuple(aux_layers)
    options = NewHeadOptions(draft_ids, norms, aux, mask_token_id, window, block_size, causal)
    head = head_class(spec).create(values, target, options)
    _draw(head, torch.Generator().manual_seed(seed))
    if init == "target":
        _start_from_target(head, target)
    head.embedding = nn.Buffer(target.embedding())
    return head


def continue_as(
    kind: str,
    head: DraftHead,
    target_dir: str | Path,
    *,
    layers: int | None = None,
    mask_token_id: int | None = None,
    seed: int = 0,
) -> DraftHead:
    """Make a head of another kind that starts from a trained head, in the head's dtype on the CPU.

    A P-EAGLE head can start from an EAGLE-3 head: it takes all of its tensors, so that its first draft is that of the
    EAGLE-3 head. New are `mask_hidden`, drawn from N(0, 0.02), and `layers` beyond those of the head (None: as many):
    they have the matrices of the first layer, but o_proj and down_proj are zero, so that they pass their input on until
    training moves them. mask_token_id as in `new_head`.

    Raises:
        HeadError: the kind cannot start from that of the head, or the options do not fit it.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = len(head.layers) if layers is None else layers
    return head_class(find_spec(kind)).continue_head(head, TargetFiles(target_dir), wanted, mask_token_id, generator)


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
        # EAGLE-3 reads [embedding; hidden]: the target's layer has only the second half.
        copy_if_alike(layer[f"self_attn.{part}.weight"][:, -hidden:], target.matrix(f"{name}self_attn.{part}.weight"))
    for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        copy_if_alike(layer[f"{part}.weight"], target.matrix(f"{name}{part}.weight"))
    # Models with four norms per layer give the one before the MLP its own name.
    before_mlp = target.gain(f"{name}pre_feedforward_layernorm.weight", f"{name}post_attention_layernorm.weight")
    copy_if_alike(layer["post_attention_layernorm.weight"], before_mlp)
    head.start_from_target(target)
