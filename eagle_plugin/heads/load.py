"""Loading any head for training and evaluation: ours, official EAGLE, SpecForge's and speculators' checkpoints.

`check_head` has the rules of serving; this reader also understands checkpoints that an engine cannot take as they
are. `save_head` writes what it returns in the form that both engines load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.heads.draft_head import DraftHead, StoredHead, head_class
from eagle_plugin.heads.files import HeadError, load_weights, read_config
from eagle_plugin.heads.interpretations import Interpretation, read_interpretations
from eagle_plugin.heads.kinds import spec_of_tensors
from eagle_plugin.heads.target_files import TargetFiles


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
    folder = Path(folder)
    raw = read_config(folder)  # first: its errors are about the folder
    weights = load_weights(folder)
    spec = spec_of_tensors(weights)
    if spec is None or "fc.weight" not in weights:
        raise HeadError(f"{folder} has no fc.weight, so it is no EAGLE head; give the folder of a draft head")
    kind = head_class(spec)
    config = _llama_keys(raw, kind)
    target = TargetFiles(target_dir)
    _check_sizes(config, target, folder)
    _check_computable(config, weights, kind, folder)
    interpretation = interpretation or _only_interpretation(folder, target_dir)
    return kind.from_checkpoint(StoredHead(folder, config, weights, interpretation, target), dtype)


def _llama_keys(raw: dict[str, Any], kind: type[DraftHead]) -> dict[str, Any]:
    """config.json as LlamaConfig wants it; speculators keep the layer's keys in a part of their own."""
    inner = raw.get("transformer_layer_config")
    config = {**inner, **{k: v for k, v in raw.items() if k not in inner}} if isinstance(inner, dict) else dict(raw)
    if isinstance(inner, dict):
        config["model_type"] = inner.get("model_type", "llama")
    kind.adapt_config(config, raw, speculators=isinstance(inner, dict))
    if config.get("fc_norm") is None and config.pop("use_aux_norm", False):
        config["fc_norm"] = True
    # `_check_computable` refuses weights with other biases; official EAGLE-1 says "bias" for that of fc.
    return config | {"bias": False, "attention_bias": False}


def _check_sizes(config: dict[str, Any], target: TargetFiles, folder: Path) -> None:
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(key) != wanted:
            raise HeadError(
                f"{folder} has {key} {config.get(key)}, but the target has {wanted}; "
                "use a head that was trained for this target"
            )


def _check_computable(config: dict[str, Any], weights: dict[str, Tensor], kind: type[DraftHead], folder: Path) -> None:
    """Refuse what the engines compute differently from each other or from the modules here."""
    biases = [name for name in weights if name.endswith(".bias") and name not in kind.stored_biases]
    if config.get("model_type", "llama") != "llama":
        found = f"model_type {config['model_type']!r}; train a head of Llama layers"
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
    else:
        return
    raise HeadError(f"{folder} has {found}")


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
