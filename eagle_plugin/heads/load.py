"""Loading any head for training and evaluation: ours, official EAGLE, SpecForge's and speculators' checkpoints, DFlash.

`check_head` has the rules of serving; this reader also understands checkpoints that an engine cannot take as they
are. `save_head` writes what it returns in the form that both engines load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.heads.block_config import is_block_drafter, without_confidence
from eagle_plugin.heads.block_drafter import describe_block
from eagle_plugin.heads.description import HeadDescription, described_spec, read_head
from eagle_plugin.heads.draft_head import DraftHead, StoredHead, head_class
from eagle_plugin.heads.files import DTYPES, HeadError, count_layers, layer_config, load_weights
from eagle_plugin.heads.formats import refuse_mask_without_features
from eagle_plugin.heads.interpretations import Interpretation, read_interpretations
from eagle_plugin.heads.kinds import find_spec
from eagle_plugin.heads.other_layouts import (
    partial_rotation,
    refuse_other_layout,
    rope_options,
    rope_sections,
    without_sections,
)
from eagle_plugin.heads.target_files import TargetFiles

# Copies of the target's tensors that speculators keeps beside the head for its training.
UNUSED = {"verifier_norm.weight", "verifier_lm_head.weight"}
ROWS = 8192


def load_any_head(
    folder: str | Path,
    target_dir: str | Path,
    dtype: torch.dtype | None = None,
    interpretation: Interpretation | None = None,
) -> DraftHead:
    """Load a head on the CPU with the embedding (and, for EAGLE-2, the lm_head) of the target in target_dir.

    dtype: of the parameters (None: that of the checkpoint's fc). interpretation: one of `read_interpretations`, needed
    only where the checkpoint can mean several things.

    Raises:
        HeadError: the checkpoint is ambiguous, incomplete, of another target, or of a form that no class here computes.
    """
    described = read_head(folder)  # first: its errors are about the folder
    folder, raw = described.folder, described.written
    if is_block_drafter(described.written):
        return _load_block_drafter(described, target_dir, dtype)
    refuse_other_layout(described.by_parameter(), described.config, folder)
    spec = described_spec(described)
    kind = head_class(spec)
    config = _llama_keys(raw, kind)
    target = TargetFiles(target_dir)
    _check_sizes(described, target)
    if not rope_sections(target.config):
        config = without_sections(config)
    weights = _without_zero_biases(load_weights(folder), kind)
    _check_computable(config, weights, kind, folder)
    _check_layers(config, weights, folder)
    if spec.format.reads_aux_layers:
        refuse_mask_without_features(raw, weights, folder)
    interpretation = interpretation or _only_interpretation(folder, target_dir)
    stored = StoredHead(folder, config, dict(weights), interpretation, target)
    try:
        head = kind.from_checkpoint(stored, dtype)
    except (KeyError, TypeError, ValueError) as error:  # of transformers, which makes a LlamaConfig of it
        raise HeadError(
            f"{folder}/config.json is not that of Llama layers ({type(error).__name__}: {error}), wanted the keys of a "
            "LlamaConfig; correct the key, or copy config.json again"
        ) from error
    _check_all_read(head, config, weights, folder)
    return head


def _load_block_drafter(described: HeadDescription, target_dir: str | Path, dtype: torch.dtype | None) -> DraftHead:
    """A drafter that vLLM loads, of what the modules here compute."""
    info = describe_block(target_dir, described.folder)
    kind, folder, config = head_class(find_spec(info.kind)), described.folder, described.config
    weights = load_weights(folder)
    computed = without_confidence(weights)
    if found := kind.find_unsupported(config, computed):
        raise HeadError(f"{folder} has {found}")
    interpretation = Interpretation(tuple(i + 1 for i in info.target_layers), False, info.kind)
    head = kind.from_checkpoint(StoredHead(folder, config, weights, interpretation, TargetFiles(target_dir)), dtype)
    _check_all_read(head, config, computed, folder)
    return head


def _llama_keys(raw: dict[str, Any], kind: type[DraftHead]) -> dict[str, Any]:
    """config.json as LlamaConfig wants it."""
    config, inner = layer_config(raw), raw.get("transformer_layer_config")
    if isinstance(inner, dict):
        config["model_type"] = inner.get("model_type", "llama")
    kind.adapt_config(config, raw, speculators=isinstance(inner, dict))
    if config.get("fc_norm") is None and config.pop("use_aux_norm", False):
        config["fc_norm"] = True
    config.pop("quantization_config", None)  # the weights that are read here are plain
    # `_check_computable` refuses weights with other biases; official EAGLE-1 says "bias" for that of fc.
    return config | {"bias": False, "attention_bias": False}


def _check_sizes(head: HeadDescription, target: TargetFiles) -> None:
    for key, wanted in ((head.hidden_size_key, target.hidden_size), ("vocab_size", target.vocab_size)):
        if head.config.get(key) != wanted:
            raise HeadError(
                f"{head.folder} has {key} {head.config.get(key)}, but the target has {wanted}; "
                "use a head that was trained for this target"
            )
    if head.quantised:
        name = head.quantised[0]
        raise HeadError(
            f"{head.folder} has {name} as {head.stored[name].dtype}, wanted one of {', '.join(DTYPES)}; give the head "
            "as it was trained"
        )


def _check_computable(config: dict[str, Any], weights: dict[str, Tensor], kind: type[DraftHead], folder: Path) -> None:
    """Refuse what the engines compute differently from each other or from the modules here."""
    biases = [name for name in weights if name.endswith(".bias") and name not in kind.stored_biases]
    if config.get("model_type", "llama") != "llama":
        found = f"model_type {config['model_type']!r}; train a head of Llama layers"
    elif (act := config.get("hidden_act") or "silu") != "silu":
        found = f"hidden_act {act!r}, with which no engine computes a head, wanted silu; train a new head"
    elif config.get("norm_before_residual"):
        found = "norm_before_residual true, which SGLang's class cannot compute; train a new head"
    elif config.get("embed_requires_grad"):
        found = "an embedding of its own, which SGLang replaces by the target's; train a head with the target's"
    elif biases:
        found = f"{biases[0]}, and engines differ in which biases of a head they add; train a head without biases"
    elif (config.get("eagle_config") or {}).get("use_aux_hidden_state", True) is False:
        found = "use_aux_hidden_state false; train a head on aux hidden states, or an EAGLE-2 head"
    elif unsupported := kind.find_unsupported(config, weights):
        found = unsupported
    elif sections := rope_sections(config):
        found = (
            f"mrope_section {sections}, which rotates by the places in an image, wanted a head of text; "
            "serve it as it is"
        )
    elif "alpha" in rope_options(config):
        found = (
            f"alpha {rope_options(config)['alpha']} in rope_scaling, which engines apply and AngelSlim's trainer does "
            "not; set rope_scaling to null if that trainer wrote the head"
        )
    elif (part := partial_rotation(config)) is not None:
        found = f"partial_rotary_factor {part}, wanted 1; train a head that rotates all"
    else:
        return
    raise HeadError(f"{folder} has {found}")


def _without_zero_biases(weights: dict[str, Tensor], kind: type[DraftHead]) -> dict[str, Tensor]:
    """The weights without biases that add nothing, as trainers store them for layers that they never trained."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if not name.endswith(".bias") or name in kind.stored_biases or tensor.any()
    }


def _check_layers(config: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> None:
    stored = count_layers(weights)
    if config.get("num_hidden_layers") != stored:
        raise HeadError(
            f"{folder} has num_hidden_layers {config.get('num_hidden_layers')} in config.json and the weights of "
            f"{stored} layer(s); write {stored} if all files of the head are there, else copy it again"
        )


def _check_all_read(head: DraftHead, config: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> None:
    """Refuse a checkpoint with a tensor that has no place in the head, or with an embedding of its own."""
    known = {*head.state_dict(), *head.spec.format.known_tensors(config), *UNUSED}
    dropped = [name for name in weights if name not in known and "rotary_emb." not in name]
    if dropped:
        more = f" and {len(dropped) - 3} more" if len(dropped) > 3 else ""
        raise HeadError(
            f"{folder} has {', '.join(dropped[:3])}{more}, wanted only the tensors of an {head.kind} head with this "
            "config.json; correct the key of config.json that belongs to them, or remove them if training did not use "
            "them"
        )
    own = weights.get("embed_tokens.weight")
    if own is not None and config.get("target_hidden_size") not in (None, config["hidden_size"]):
        return  # a narrower head than its target reads its own
    if own is not None and not head.own_embedding and not _same_embedding(own, head.embedding):
        raise HeadError(
            f"{folder} has embed_tokens.weight of shape {list(own.shape)} with other values than the target's, wanted "
            "the target's, by which SGLang replaces it; train a head with the target's embedding, or remove the tensor "
            "if this one was"
        )


def _same_embedding(own: Tensor, target: Tensor) -> bool:
    """Whether two embeddings are one, each rounded to its own type; in parts, because both can be large."""
    if own.shape != target.shape:
        return False
    pairs = zip(own.split(ROWS), target.split(ROWS), strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-6) for a, b in pairs)


def _only_interpretation(folder: Path, target_dir: str | Path) -> Interpretation:
    found = read_interpretations(folder, target_dir)
    if len(found) > 1:
        options = " or ".join(
            f"{','.join(map(str, one.aux_layers))} ({one.origin}{'' if one.norm_output else ', state not normed'})"
            for one in found
        )
        raise HeadError(
            f"{folder} can mean the aux layers {options}; "
            "`eagle-plugin check` measures which it was trained on, `eagle-plugin export --aux-layers` writes it down"
        )
    return found[0]
