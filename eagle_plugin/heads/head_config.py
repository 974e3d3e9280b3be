"""The types and ranges of a draft head's config.json, checked once, before anything is loaded. torch is not imported.

Only what every engine needs to be right is here. Keys that are missing, and values that only some engines serve, are
judged where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eagle_plugin.heads.files import HeadError

# What SGLang, vLLM and transformers know under this key; each engine refuses what only the others know.
# Without these transformers, by which both engines read config.json, refuses the type.
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_TYPES = """
    bailing_mrope deepseek_llama_scaling deepseek_yarn default dynamic linear llama3 longrope mllama4 mrope ntk
    openpangu proportional su telechat3-yarn yarn
    """
ROPE_TYPES = frozenset(_ROPE_TYPES.split())
ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
)
DTYPES = frozenset({"bfloat16", "double", "float", "float16", "float32", "float64", "half"})
MOST_LAYERS, LARGEST = 1000, 1 << 27


def _size(largest: int = LARGEST) -> Any:
    return Field(None, strict=True, ge=1, le=largest, description=f"a whole number from 1 to {largest}")


def _switch() -> Any:
    return Field(None, strict=True, description="true or false")


class HeadConfig(BaseModel):
    """The keys of a head's layers, at the top level; None: missing or null."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    hidden_size: int | None = _size()
    target_hidden_size: int | None = _size()
    intermediate_size: int | None = _size()
    num_hidden_layers: int | None = _size(MOST_LAYERS)
    num_attention_heads: int | None = _size()
    num_key_value_heads: int | None = _size()
    head_dim: int | None = _size()
    vocab_size: int | None = _size()
    draft_vocab_size: int | None = _size()
    num_aux_hidden_states: int | None = _size(MOST_LAYERS)
    max_position_embeddings: int | None = Field(None, strict=True, ge=1, description="a whole number from 1")
    rms_norm_eps: float | None = Field(None, strict=True, ge=0, lt=1, description="a number from 0 to 1, such as 1e-05")
    rope_theta: float | None = Field(None, strict=True, gt=0, description="a number above 0, such as 10000.0")
    rope_scaling: dict[str, Any] | None = Field(None, description="an object or null")
    rope_parameters: dict[str, Any] | None = Field(None, description="an object or null")
    eagle_config: dict[str, Any] | None = Field(None, description="an object")
    dflash_config: dict[str, Any] | None = Field(None, description="an object")
    quantization_config: dict[str, Any] | None = Field(None, description="an object or null")
    hidden_act: str | None = Field(None, strict=True, description="a name, such as silu")
    dtype: str | None = Field(None, strict=True, description="bfloat16, float16 or float32")
    torch_dtype: str | None = Field(None, strict=True, description="bfloat16, float16 or float32")
    tie_word_embeddings: bool | None = _switch()
    attention_bias: bool | None = _switch()
    mlp_bias: bool | None = _switch()
    bias: bool | None = _switch()
    fc_norm: bool | None = _switch()
    use_aux_norm: bool | None = _switch()
    norm_before_fc: bool | None = _switch()
    norm_before_residual: bool | None = _switch()
    norm_output: bool | None = _switch()

    @field_validator("dtype", "torch_dtype")
    @classmethod
    def _is_a_dtype(cls, name: str | None) -> str | None:
        if name is not None and name not in DTYPES:
            raise ValueError("unknown dtype")
        return name


def validate_config(config: Mapping[str, Any], path: Path) -> None:
    """Check a config.json (with the keys of its layers at the top) that was read from `path`.

    Raises:
        HeadError: for the first key with a value that no engine can read.
    """
    try:
        HeadConfig.model_validate(dict(config))
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise _wrong(path, key, config[key], HeadConfig.model_fields[key].description) from None
    _check_rope(config, path)


def _check_rope(config: Mapping[str, Any], path: Path) -> None:
    """The base and the type of the rotary positions, under either name of their options."""
    options = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for name, values in options.items():
        _check_rope_options(name, values, path)
    bases = [values.get("rope_theta") for values in options.values()]
    if "rope_theta" in config and config["rope_theta"] is None and not any(bases):
        raise _wrong(path, "rope_theta", None, "a number above 0: the target's, if the head was trained with it")


def _check_rope_options(name: str, options: Mapping[str, Any], path: Path) -> None:
    if options.get("rope_theta") is not None and not _is_number(options["rope_theta"]):
        raise _wrong(path, f"{name}.rope_theta", options["rope_theta"], "a number above 0, such as 10000.0")
    kind = options.get("rope_type", options.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        known = "default, linear, dynamic, yarn, longrope or llama3"
        raise _wrong(path, f"{name}.rope_type", kind, f"a type that the engines know, such as {known}")
    for key in ROPE_NUMBERS:
        found = options.get(key)
        if not _is_number(found) and (found is not None or key in ROPE_NEEDS.get(kind, ())):
            raise _wrong(path, f"{name}.{key}", found, f"a number above 0 beside the type {kind}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


def _wrong(path: Path, key: str, found: object, wanted: str | None) -> HeadError:
    shown = repr(found) if len(repr(found)) <= 80 else f"{repr(found)[:80]}..."
    return HeadError(f"{path} has {key} {shown}, wanted {wanted}; correct the key, or copy config.json again")
