"""The servers of benchmarks/targets.py: a tiny target of a family, plain and with each kind of head."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))  # before this folder

from family_models import family_head, family_target, sglang_target
from multimodal_models import KINDS as MULTIMODAL
from multimodal_models import TEXT_ONLY, multimodal_target
from serving import tiny_spec, vllm_spec
from tiny_checkpoints import read_config

from eagle_plugin.bench.spec import EngineName, ServerSpec

SHAPE = (3, 4, 16)
KINDS = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE", "eagle2": "EAGLE-2"}
# SGLang keeps the inputs of Qwen3-Next's convolutions in bfloat16 unless told.
ENVIRONMENT = {"EAGLE_POLICY": "fixed", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
# Engines that have no plain decoding of a family in float32 on CPUs: the texts are compared with the other engine's.
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
WITHOUT_PLAIN: dict[tuple[EngineName, str], EngineName] = {("vllm", family): "sglang" for family in HYBRID}
STATES = ("--max-mamba-cache-size", "64")  # else SGLang makes room for the states of thousands of requests


def specs_of(engine: EngineName, family: str, folder: Path) -> dict[str, ServerSpec]:
    """A plain server's, and one with the plugin for each kind of head."""
    make = multimodal_target if family in MULTIMODAL else sglang_target if engine == "sglang" else family_target
    target = make(folder / "target", family)
    found = {"plain": spec_of(WITHOUT_PLAIN.get((engine, family), engine), target)}
    for kind in KINDS:
        head = family_head(folder / kind, target, kind)
        found[kind] = spec_of(engine, target, head, SHAPE, name=kind)
    return found


def spec_of(engine: EngineName, target: Path, *drafted: Any, **options: Any) -> ServerSpec:
    """A server of an engine over a tiny target; `drafted` are its head and the shape of its trees."""
    if engine == "sglang":
        flags = ("--skip-server-warmup", *STATES)
        return tiny_spec(target, *drafted, environment=ENVIRONMENT, extra_flags=flags, **options)
    flags = ["--block-size", "32"]  # an attention chunk of Llama 4 must be a multiple of it
    if not (target / "processor_config.json").exists() and read_config(target)["model_type"] in MULTIMODAL:
        flags += ["--limit-mm-per-prompt", json.dumps(TEXT_ONLY)]  # there is nothing to read pictures with
    if read_config(target)["model_type"] == "gpt_oss":  # for its chats vLLM wants the real vocabulary
        flags += ["--hf-overrides", '{"model_type": "gpt_oss_tiny"}']
    options |= {
        "environment": ENVIRONMENT | {"PYTHONPATH": ""},
        "extra_flags": tuple(flags),
        "max_total_tokens": 65536,  # in smaller blocks than usual, of several kinds of layers
    }
    return vllm_spec(target, *drafted, **options)
