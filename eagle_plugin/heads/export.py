"""Writing a head as a checkpoint folder that stock SGLang and stock vLLM both load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_plugin.common.atomic_io import flush_to_disk, write_tensors
from eagle_plugin.heads.contents import record
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.files import HeadError, read_config, read_tensors, text_config
from eagle_plugin.heads.manifest import FORMAT, MANIFEST, describe_target

WEIGHTS = "model.safetensors"
WRITTEN = {"config.json", WEIGHTS, MANIFEST}
# Copied from the head's LlamaConfig; every key is written out, so that no engine uses a default of its own.
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

    The folder is complete or it is not there; an existing one is replaced if it has only the files of a head.
    manifest: what is known of the training ("training", "acceptance", ...), written beside the kind of the head, its
    aux layers, the digests of the target and the record of config.json and the weights (`heads.contents`);
    "target_name" is the target's name for readers.

    Raises:
        HeadError: the folder holds other files or cannot be written, the engines do not load the dtype, or a weight is
            not finite.
    """
    folder = Path(folder).absolute()
    if dtype not in DTYPE_NAMES:
        raise HeadError(f"dtype is {dtype}, wanted bfloat16, float16 or float32; export the head in one of them")
    tensors = head.stored_tensors(dtype)
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise HeadError(f"{broken[0]} has values that are not finite in {dtype}; export an earlier checkpoint")
    notes = dict(manifest or {})
    target = describe_target(target_dir)
    target["name"] = notes.pop("target_name", target["name"])
    about = {"format": FORMAT, "kind": head.kind, "aux_layers": list(head.aux_layers), "target": target}
    config = head_config(head, target_dir, dtype)
    try:
        _check_replaceable(folder)
        _write_folder(folder, tensors, config, about, notes)
    except OSError as error:
        raise HeadError(
            f"cannot write {folder} ({error.strerror or error}); free space or make it writable, or name another folder"
        ) from error


def warn_of_biases(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> list[str]:
    """Warnings about biases that are not zero: SGLang's EAGLE-2 class adds that of fc, and vLLM's does not read it.

    tensors: of the head in `folder`, by their canonical names; others than biases are not looked at.
    """
    return [
        f"{folder} has {name} with values other than zero, which SGLang adds and vLLM drops, so that vLLM accepts "
        "fewer of its drafts; for vLLM use a head that was trained without it"
        for name, tensor in tensors.items()
        if name.endswith(".bias") and tensor.any()
    ]


def _write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    about: dict[str, Any],
    notes: Mapping[str, Any],
) -> None:
    """Write the three files of a head, all or nothing; the manifest has `about`, a record of the other two, `notes`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        write_tensors(temporary / WEIGHTS, tensors, metadata={"format": "pt"})
        _write_json(temporary / "config.json", config)
        about = about | record(read_tensors(temporary), read_config(temporary))
        _write_json(temporary / MANIFEST, {**about, **notes, **about})
        for path in temporary.iterdir():
            path.chmod(0o644)
            flush_to_disk(path)
        flush_to_disk(temporary)
        _put(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    flush_to_disk(folder.parent)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def head_config(head: DraftHead, target_dir: str | Path, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a head, valid for both engines on this target."""
    config = head.config
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    rope.pop("partial_rotary_factor", None)  # 1, which vLLM alone would read there
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values: dict[str, Any] = {"architectures": list(head.spec.architectures), "model_type": "llama"}
    values |= {key: getattr(config, key) for key in SHAPE_KEYS}
    served = text_config(read_config(target_dir)).get("max_position_embeddings") or 0
    values |= {
        "max_position_embeddings": max(config.max_position_embeddings, served),  # SGLang does not start with less
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
    values |= head.config_keys(target_dir)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, key, None) is not None:
            values[key] = getattr(config, key)
    return values | {"torch_dtype": DTYPE_NAMES[dtype], "dtype": DTYPE_NAMES[dtype]}


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise HeadError(f"{folder} is a file; give the name of a folder")
    other = sorted(path.name for path in folder.iterdir() if path.name not in WRITTEN)
    if other:
        raise HeadError(
            f"{folder} holds {other[0]}, which is not a file of a head and would be deleted; give a new folder"
        )


def _put(new: Path, folder: Path) -> None:
    """Rename a complete folder to its name. A kill between the two renames leaves both versions, under other names."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_name(f"{new.name}.old")
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)
