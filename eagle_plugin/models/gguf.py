"""Convert a GGUF file into a Hugging Face model folder that any engine can load."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_plugin.common.installed import install_command
from eagle_plugin.models.catalog import ModelError

Report = Callable[[float], None]


def convert_gguf(gguf: Path, out: Path, report: Report) -> None:
    """Write config, generation config, tokenizer, chat template and bf16 weights of `gguf` into the folder `out`.

    Quantized tensors are converted to bf16; nothing else is changed. Raises ModelError if a library or a tensor is
    missing, or if the file has no chat template or no end token.
    """
    try:
        import gguf as _  # noqa: F401  transformers imports it later, and its message names no fix
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise ModelError(
            f"converting {gguf.name} needs {error.name}, which is not installed; "
            f"use the engine's environment (`make env`) or: {install_command('models')}"
        ) from error

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise ModelError(f"{gguf.name} has no chat template or no end token; only chat models can be converted")
    report(0.2)
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    architecture, tensors = _read_tensors(gguf, config, torch.bfloat16)
    report(0.8)

    out.mkdir(parents=True, exist_ok=True)
    _plain_config(config, architecture, tokenizer)
    config.save_pretrained(out)
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    GenerationConfig(**ends, pad_token_id=config.pad_token_id).save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it readable by its owner only
    report(1.0)


def _read_tensors(gguf: Path, config: Any, dtype: Any) -> tuple[str, dict[str, Any]]:
    """The class name of the architecture and its tensors by name; a tied output layer is not stored twice."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # only for the names; `from_pretrained` would need accelerate, which no engine needs
        skeleton = AutoModelForCausalLM.from_config(config)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers would draw its own progress bar over ours
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)[
            "tensors"
        ]
    wanted = dict(skeleton.named_parameters())  # lists a tied parameter once
    for name, parameter in wanted.items():
        if name not in tensors:
            raise ModelError(f"{gguf.name} has no tensor for {name}; it is not a complete {config.model_type} model")
        if tensors[name].shape != parameter.shape:
            found, shape = tuple(tensors[name].shape), tuple(parameter.shape)
            raise ModelError(f"{gguf.name}: {name} has shape {found}, wanted {shape} by the file's own header")
    return type(skeleton).__name__, {name: tensors[name].contiguous() for name in wanted}


def _plain_config(config: Any, architecture: str, tokenizer: Any) -> None:
    """Change a config that was read from a GGUF file into that of the original model."""
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file stores a float32: 9.999999747378752e-06
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config.rope_theta = config.rope_parameters["rope_theta"]  # transformers before version 5 reads this key
