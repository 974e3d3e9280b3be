"""What is trained and how: the head with its objective, and the optimisers of its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from eagle_plugin.heads.create import continue_as, new_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.target_config import read_target_config, refuse_scaled_embedding
from eagle_plugin.heads.target_files import TargetFiles
from eagle_plugin.learning.data.store.features import Readout
from eagle_plugin.learning.data.vocabulary import load_draft_vocabulary
from eagle_plugin.learning.train.distributed import gather_whole, scatter_like
from eagle_plugin.learning.train.methods import ObjectiveSettings, TrainingTimeTest, method_of
from eagle_plugin.learning.train.objectives import Objective
from eagle_plugin.learning.train.recipe import TrainError, TrainRecipe

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def objective_settings(settings: TrainRecipe, steps: int, method: TrainingTimeTest) -> ObjectiveSettings:
    """The objective of a phase of `steps` draft steps; method: of the kind."""
    values = settings.loss.model_dump()
    values["loss"] = values.pop("name")
    if values["decay"] is None:
        values["decay"] = method.default_decay(settings.depths)
    return ObjectiveSettings(steps=steps, dtype=DTYPES[settings.dtype], **values)


def make_head(settings: TrainRecipe, aux_layers: tuple[int, ...]) -> DraftHead:
    """The head that a recipe starts from, in float32 on the CPU; aux_layers are those of the features.

    Raises:
        HeadError: it does not fit its target.
        TrainError: it does not fit the features.
    """
    options, target = settings.head, settings.target
    ids = None if options.vocabulary is None else load_draft_vocabulary(options.vocabulary)[0]
    if options.start is not None:
        head = _existing_head(settings, options.start, ids)
        if options.window is not None:
            head.set_window(options.window)
        return head
    shape = options.shape()
    if options.drafts_blocks:
        shape.setdefault("block_size", settings.depths + 1)
    head = new_head(options.kind, target, ids, aux_layers=aux_layers or None, seed=settings.seed, **shape)
    _check_takes_vocabulary(head, options.vocabulary)
    return head


def _existing_head(settings: TrainRecipe, start: Path, ids: Tensor | None) -> DraftHead:
    """The head in the folder `start`, with the draft vocabulary `ids` and of the kind that the recipe names."""
    options, target = settings.head, settings.target
    head = load_any_head(start, target, torch.float32)
    if ids is not None:
        _check_takes_vocabulary(head, options.vocabulary)
        head.change_vocabulary(ids, TargetFiles(target).lm_head())
    if options.kind not in ("auto", head.kind):
        grown = {"layers": options.layers, "mask_token_id": options.mask_token_id}
        return continue_as(options.kind, head, target, seed=settings.seed, **grown)
    if own := ", ".join(key for key in options.shape() if key != "window"):
        raise TrainError(f"{start} is a head of kind {head.kind} and has its own {own}; leave these keys out")
    return head


def _check_takes_vocabulary(head: DraftHead, vocabulary: Path | None) -> None:
    if vocabulary is not None and head.own_lm_head is None:
        raise TrainError(
            f"head.vocabulary is {vocabulary}, and this {head.kind} head drafts from all tokens of its target; "
            "leave the key out"
        )


def check_features(head: DraftHead, aux_layers: tuple[int, ...]) -> None:
    """Raise TrainError unless the features hold the layers that the head reads."""
    if head.aux_layers and head.aux_layers != aux_layers:
        wanted, found = (",".join(map(str, layers)) or "none" for layers in (head.aux_layers, aux_layers))
        raise TrainError(
            f"the head reads the inputs of target layers {wanted}, and the features hold {found}; "
            f"extract them again with --aux-layers {wanted}"
        )


def make_objective(settings: TrainRecipe, head: DraftHead, readout: Readout, device: torch.device) -> Objective:
    """The objective of the first phase on a device; readout: of the target, in any dtype.

    Raises:
        HeadError: heads of this kind are not trained, or no block drafters of this target.
        TrainError: the head's window or block does not fit the draft steps, the recipe's loss has keys of others, or
            the device does not compute in its dtype.
    """
    method = method_of(head)
    if method.packs and device.type == "cuda" and settings.dtype == "float32":
        raise TrainError(
            f"dtype is float32, in which a head of kind {head.kind} is not trained on a GPU, wanted bfloat16; leave "
            "the key out, or set device to cpu"
        )
    if head.window is not None and head.window <= settings.depths:
        raise TrainError(
            f"the head sees {head.window} keys and a phase has {settings.depths} draft steps, wanted a window of more "
            "keys than steps: each step's own key is one of them; raise head.window"
        )
    _check_block(settings, head)
    if unread := sorted(settings.loss.model_fields_set & method.refused):
        raise TrainError(f"loss.{unread[0]} is not for a head of kind {head.kind}, which does not use it; leave it out")
    first = objective_settings(settings, settings.phases[0].steps, method)
    bias = None if readout.bias is None else readout.bias.to(device, first.dtype)
    readout = Readout(readout.weight.to(device, first.dtype), bias, readout.factor, readout.softcap)
    return Objective(head.to(device), readout, first)


def _check_block(settings: TrainRecipe, head: DraftHead) -> None:
    """Raise TrainError where a phase drafts levels that the block of a block drafter does not have.

    Raises:
        HeadError: the engines give a block drafter of this target different embeddings.
    """
    if head.block_size is None:
        return
    refuse_scaled_embedding(read_target_config(settings.target), settings.target)
    most = head.block_size - 1
    wrong = [p.steps for p in settings.phases if p.steps > most or p.steps < most and not head.causal]
    if wrong:
        why = (
            "" if head.causal else ": all rows of a block see each other, so that a shorter one is another computation"
        )
        raise TrainError(
            f"the head has a block of {most + 1} rows and a phase has {wrong[0]} draft steps, wanted "
            f"{'at most ' if head.causal else ''}{most}{why}; correct phases.steps, or head.block_size of a new head"
        )


def take_parameters(head: DraftHead, parameters: dict[str, Tensor]) -> DraftHead:
    """Copy the trained parameters of an objective into another instance of its head."""
    with torch.no_grad():
        own = dict(head.named_parameters())
        for name, value in parameters.items():
            own[name.removeprefix("head.")].copy_(value)
    return head


class Parameters:
    """The trained parameters of an objective by name, with their optimisers.

    Muon updates the matrices between the embedding and lm_head, for which its orthogonal updates are meant, with the
    learning rate scaled to AdamW's; AdamW updates the rest.
    """

    def __init__(self, objective: nn.Module, settings: TrainRecipe, in_buckets: bool = False) -> None:
        """in_buckets: the gradients are parts of DDP's buckets."""
        self._in_buckets = in_buckets
        self.named = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        options = settings.optimiser
        head_lr = settings.lm_head_lr
        groups: dict[tuple[str, float], list[Tensor]] = {}
        for name, parameter in self.named.items():
            vocabulary = name.endswith("lm_head.weight")
            matrix = parameter.ndim == 2 and min(parameter.shape) > 1 and not vocabulary
            optimiser = "muon" if options.name == "muon" and matrix else "adamw"
            groups.setdefault((optimiser, head_lr if vocabulary else options.lr), []).append(parameter)
        self.optimisers: list[Optimizer] = []
        if part := _param_groups(groups, "adamw"):
            self.optimisers.append(AdamW(part, betas=options.betas, weight_decay=options.weight_decay, fused=True))
        if part := _param_groups(groups, "muon"):
            muon = Muon(part, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw")
            self.optimisers.append(muon)
        self._clip = options.clip

    def step(self, factor: float) -> Tensor:
        """Clip the gradients, update with the learning rates times `factor`, and return the norm before clipping."""
        norm = nn.utils.clip_grad_norm_(list(self.named.values()), self._clip)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimiser.step()
            # Those in DDP's buckets stay there: an update of several forwards would make others beside them.
            optimiser.zero_grad(set_to_none=not self._in_buckets)
        return gather_whole(norm)

    def not_finite(self) -> list[str]:
        """The names of the parameters with values that are not finite; every process must call it."""
        finite = [gather_whole(p.detach()).isfinite().all() for p in self.named.values()]
        return [name for name, fine in zip(self.named, torch.stack(finite).tolist(), strict=True) if not fine]

    def gather(self, keep: bool, copy: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and optimiser state, whole and on the CPU; every process must call it.

        keep: False in a process that does not use them, which gets nothing and copies nothing from its device.
        copy: of what is on the CPU, too; without it the next update changes these tensors.
        """
        parameters: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            for kept, key, value in [
                (parameters, name, parameter.detach()),
                *((state, f"{name}/{key}", value) for key, value in self._state(parameter).items()),
            ]:
                whole = gather_whole(value)
                if keep:
                    kept[key] = whole.to("cpu", copy=copy).contiguous()
        return parameters, state

    def restore(self, parameters: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Load what `gather` returned.

        Raises:
            TrainError: it is of another head.
        """
        shapes = {name: tuple(value.shape) for name, value in self.named.items()}
        if shapes != {name: tuple(value.shape) for name, value in parameters.items()}:
            raise TrainError(
                "the checkpoint holds parameters of another head than the recipe makes now; "
                "restore the head's files, or give another folder (--out)"
            )
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(scatter_like(parameters[name], parameter))
                owner = self._owner(parameter)
                owner.state[parameter] = {
                    key.rpartition("/")[2]: scatter_like(value, parameter)
                    for key, value in state.items()
                    if key.rpartition("/")[0] == name
                }

    def _owner(self, parameter: Tensor) -> Optimizer:
        for optimiser in self.optimisers:
            if any(parameter is other for group in optimiser.param_groups for other in group["params"]):
                return optimiser
        raise KeyError("a parameter without an optimiser")

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        return self._owner(parameter).state.get(parameter, {})


def _param_groups(groups: dict[tuple[str, float], list[Tensor]], wanted: str) -> list[dict[str, Any]]:
    return [
        {"params": parameters, "lr": lr, "base_lr": lr} for (name, lr), parameters in groups.items() if name == wanted
    ]
