"""Writing a head as a checkpoint folder that stock SGLang and stock vLLM both load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_plugin.atomic_io import flush_to_disk
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import HeadError, read_config, text_config
from eagle_plugin.heads.layers import DraftHead
from eagle_plugin.heads.manifest import FORMAT, MANIFEST, describe_target
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.heads.shape import ARCHITECTURES
from eagle_plugin.heads.targets import sglang_ids, sglang_layers

WEIGHTS = "model.safetensors"
WRITTEN = {"config.json", WEIGHTS, MANIFEST}
# Copied from the head's LlamaConfig; every key is written out, so that no engine falls back on a default of its own.
SHAPE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
)
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    target_dir: str | Path,
    manifest: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and eagle_plugin.json; the same head gives the same bytes.

    The folder appears whole or not at all; an existing one is replaced if it holds nothing but a head written here.
    manifest: what is known of the training ("training", "acceptance", ...), written beside the kind of the head, its
    aux layers and the digests of the target; "target_name" is the name of the target for people.

    Raises:
        HeadError: the folder holds other files, the dtype is none that the engines load, or a weight is not finite.
    """
    folder = Path(folder).absolute()
    if dtype not in DTYPE_NAMES:
        raise HeadError(f"dtype is {dtype}, wanted bfloat16, float16 or float32; export the head in one of them")
    tensors = head_tensors(head, dtype)
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise HeadError(f"{broken[0]} has values that are not finite in {dtype}; export an earlier checkpoint")
    notes = dict(manifest or {})
    target = describe_target(target_dir)
    target["name"] = notes.pop("target_name", target["name"])
    about = {"format": FORMAT, "kind": head.kind, "aux_layers": list(head.aux_layers), "target": target}
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        for name, values in (
            ("config.json", head_config(head, target_dir, dtype)),
            (MANIFEST, {**about, **notes, **about}),
        ):
            (temporary / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            path.chmod(0o644)
            flush_to_disk(path)
        flush_to_disk(temporary)
        _put(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    flush_to_disk(folder.parent)


def head_config(head: DraftHead, target_dir: str | Path, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a head, valid for both engines on this target."""
    config = head.config
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values: dict[str, Any] = {"architectures": ARCHITECTURES[head.kind], "model_type": "llama"}
    values |= {key: getattr(config, key) for key in SHAPE_KEYS}
    served = text_config(read_config(target_dir)).get("max_position_embeddings") or 0
    values |= {
        "max_position_embeddings": max(config.max_position_embeddings, served),  # SGLang refuses to start below
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        # Engines differ in which of the two spellings they read.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    if isinstance(head, Eagle3Head):
        values |= _eagle3_keys(head, target_dir)
    if isinstance(head, PEagleHead):
        values |= {"mask_token_id": head.mask_token_id, "ptd_token_id": head.mask_token_id}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, key, None) is not None:
            values[key] = getattr(config, key)
    return values | {"torch_dtype": DTYPE_NAMES[dtype], "dtype": DTYPE_NAMES[dtype]}


def _eagle3_keys(head: Eagle3Head, target_dir: str | Path) -> dict[str, Any]:
    target = read_config(target_dir)
    architecture = (target.get("architectures") or ["?"])[0]
    layers = text_config(target)["num_hidden_layers"]
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    values: dict[str, Any] = {
        "target_hidden_size": head.target_hidden_size,
        "draft_vocab_size": len(head.d2t),
        "norm_before_residual": False,  # vLLM alone knows it; True is its default for some formats
        "fc_norm": head.fc_norm is not None,
        "norm_before_fc": head.input_norm is not None,
        "norm_output": head.norm_output,
        "num_aux_hidden_states": len(head.aux_layers),
    }
    default = (2, layers // 2, layers - 3)
    if head.aux_layers != default or sglang_layers(architecture, None, layers) != default:
        # vLLM reads the first key and SGLang the second; the same layers have other numbers there.
        values["eagle_aux_hidden_state_layer_ids"] = list(head.aux_layers)
        eagle["eagle_aux_hidden_state_layer_ids"] = sglang_ids(architecture, head.aux_layers, layers)
    return values | {"eagle_config": eagle}


@torch.no_grad()
def head_tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a head's checkpoint by the names that both engines read, on the CPU."""
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in head.named_parameters()}
    if isinstance(head, Eagle2Head):
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
    for i in range(1, head.config.num_hidden_layers):
        # The same norm: SGLang calls it hidden_norm in layers after the first, vLLM input_layernorm.
        tensors[f"layers.{i}.input_layernorm.weight"] = tensors[f"layers.{i}.hidden_norm.weight"].clone()
    vocab = head.config.vocab_size
    if len(head.d2t) < vocab:  # vLLM refuses the tables of a head that drafts from the whole vocabulary
        d2t = head.d2t.cpu()
        known = torch.zeros(vocab, dtype=torch.bool)
        known[d2t + torch.arange(len(d2t))] = True
        tensors |= {"d2t": d2t, "t2d": known}
    if isinstance(head, Eagle3Head) and head.target_hidden_size != head.config.hidden_size:
        tensors["embed_tokens.weight"] = head.embedding.detach().to("cpu", dtype)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise HeadError(f"{folder} is a file; give the name of a folder")
    other = sorted(path.name for path in folder.iterdir() if path.name not in WRITTEN)
    if other:
        raise HeadError(
            f"{folder} holds {other[0]}, which is no file of a head and would be lost; give a new folder or empty it"
        )


def _put(new: Path, folder: Path) -> None:
    """Move a complete folder to its place. A kill between the two renames leaves both versions, under other names."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_name(f"{new.name}.old")
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)
