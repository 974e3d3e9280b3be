"""Which of vLLM's classes loads a draft head, and what that class reads of its files.

The facts are those of vLLM's registry, of `EAGLEConfig`, `SpeculatorsConfig` and the classes themselves; tests compare
them with vLLM. vLLM itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle_plugin.heads.aux_layers import KEY as AUX_IDS
from eagle_plugin.heads.block_config import METHODS as BLOCK_METHODS
from eagle_plugin.heads.contents import is_zero
from eagle_plugin.heads.description import HeadDescription
from eagle_plugin.heads.files import HeadError, LeftToEngine, StoredTensor, canonical_name
from eagle_plugin.heads.other_layouts import computed, find_part, switches

METHODS = ("eagle", "eagle3", *BLOCK_METHODS)  # of --speculative-config, that our worker serves
EAGLE = ("EagleLlamaForCausalLM",)
EAGLE3 = (
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "PeagleLlamaForCausalLM",
    "PEagleDraftModel",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)  # all of them name one class
QWEN3 = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")  # EAGLE-3 with a norm of queries and keys
CHECKED = (*EAGLE, *EAGLE3, *QWEN3)  # whose files are compared with what the class reads
# EAGLE with Mistral's layers, a norm before the first and one after the last; published in Mistral's own format, whose
# files are not checked.
MISTRAL = ("EagleMistralForCausalLM",)
SERVED = (*CHECKED, *MISTRAL)
# The class that vLLM's SpeculatorsConfig gives a head, by `speculators_model_type` and the type of its layers.
_SPECULATORS = {
    ("eagle3", "llama"): "Eagle3LlamaForCausalLM",
    ("eagle3", "qwen3"): "Eagle3Qwen3ForCausalLM",
    ("peagle", "llama"): "PeagleLlamaForCausalLM",
    ("peagle", "qwen3"): "PeagleQwen3ForCausalLM",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def class_name(head: HeadDescription, method: str) -> str:
    """The name under which vLLM looks up the class of a head; method: of --speculative-config.

    Raises:
        LeftToEngine: it is not one of `CHECKED`.
    """
    found = _class_names(head, method)
    served = next((name for name in found if name in CHECKED), None)
    if served is None:
        raise LeftToEngine(
            f"{head.folder} has architectures {head.written.get('architectures')}, which vLLM looks up as "
            f"{', '.join(found) or 'nothing'}; the plugin serves {', '.join(CHECKED)}; if its layers are Llama's, "
            f"write it again: eagle-plugin export {head.folder} NEW --target TARGET"
        )
    return served


def _class_names(head: HeadDescription, method: str) -> list[str]:
    speculators = head.written.get("speculators_model_type")
    if speculators is not None:
        name = _SPECULATORS.get((speculators, head.config.get("model_type", "llama")))
        return [] if name is None else [name]
    names = head.written.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if method == "eagle3":
        return [n if n.startswith("Eagle3") or n.endswith("Eagle3") else f"Eagle3{n}" for n in names]
    return [n if n.startswith("Eagle") else f"Eagle{n}" for n in names]


def class_config(head: HeadDescription) -> dict[str, Any]:
    """The keys that vLLM's class reads: of a head of speculators those of its layers, and some of the others."""
    speculators = head.written.get("speculators_model_type")
    if speculators is None:
        return dict(head.config)
    inner, outer = head.written.get("transformer_layer_config") or {}, head.written
    keys = {
        key: outer.get(key) for key in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    }
    # What vLLM takes for a key that is not there. Of P-EAGLE heads it does not read the newer norms.
    keys["norm_before_residual"] = outer.get("norm_before_residual", speculators == "eagle3")
    keys["norm_before_fc"] = outer.get("norm_before_fc", False)
    if speculators == "eagle3":
        keys |= {"fc_norm": outer.get("fc_norm", False), "norm_output": outer.get("norm_output", False)}
    return dict(inner) | keys


def counted_aux(config: dict[str, Any], name: str, layers: tuple[int, ...]) -> int | None:
    """The number of aux hidden states that vLLM's class makes its fc for, where that is not the number of `layers`.

    config: `class_config`; name: the class; layers: those that are captured.
    """
    eagle = config.get("eagle_config") or {}
    count = config.get("num_aux_layers") if name in QWEN3 else None
    count = count if count is not None else config.get("num_aux_hidden_states")
    if count is None:
        ids = (config.get(AUX_IDS) if name in QWEN3 else None) or eagle.get(AUX_IDS)
        count = len(ids) if ids else 3
    return None if count == len(layers) else int(count)


def biases(config: dict[str, Any], name: str) -> Iterator[str]:
    """The biases that vLLM's class has for these keys, by canonical name; config: `class_config`, name: the class."""
    attention, both = config.get("attention_bias"), config.get("attention_bias") or config.get("bias")
    found = [*_QKV] if (both if name in EAGLE else attention) else []
    if both and name not in QWEN3:
        found.append("self_attn.o_proj")
    if config.get("mlp_bias") and name not in QWEN3:
        found += _MLP
    for i in range(config.get("num_hidden_layers") or 0):
        yield from (f"layers.{i}.{part}.bias" for part in found)


def refuse_unknown(head: HeadDescription, known: set[str]) -> None:
    """Refuse a head with tensors for which vLLM's class has no parameter: its loader ends with them.

    known: canonical names of the parameters. Biases and tables of positions without one are left out in silence.

    Raises:
        HeadError: it has some.
    """
    unknown = [name for name in head.stored if not _is_loaded(name, known)]
    if unknown and (found := find_part(unknown)) is not None:
        name, part = found
        raise HeadError(
            f"{head.folder} has {name}, which is {part.what} ({part.origin}), for which the class that vLLM takes by "
            "config.json has no parameter, so that vLLM does not start with the head; "
            f"{part.served or 'use or train a head without it'}"
        )
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise HeadError(
            f"{head.folder} has {', '.join(unknown[:3])}{more}, for which vLLM's class for EAGLE heads has no "
            "parameter, so that vLLM does not start with the head; write it again: "
            f"eagle-plugin export {head.folder} NEW --target TARGET"
        )


def _is_loaded(name: str, known: set[str]) -> bool:
    ignored = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    if any(table in name for table in ("t2d", "d2t", "mask_hidden", *ignored)):
        return True
    # Names of the loader, which puts "model." before all but lm_head.
    return name.replace("midlayer.", "layers.0.") in known or name.endswith(".bias")


def misread(
    head: HeadDescription, config: dict[str, Any], name: str, tensors: dict[str, StoredTensor]
) -> Iterator[str]:
    """Warnings about what vLLM's class leaves out, or makes up, in silence; config: `class_config`, name: the class."""
    folder, eagle = head.folder, config.get("eagle_config") or {}
    if "input_norm.weight" in tensors and not eagle.get("norm_before_fc", config.get("norm_before_fc")):
        yield (
            f"{folder} has input_norm.weight without norm_before_fc true in config.json, and vLLM leaves the norm out; "
            "if the head was trained with it, its drafts are poor: set norm_before_fc to true"
        )
    known = set(biases(config, name))
    if missing := sorted(known - set(tensors)):
        key = next(key for key in ("attention_bias", "bias", "mlp_bias") if config.get(key))
        yield (
            f"{folder} has {key} true and no {missing[0]}, which vLLM's class then has and leaves at random values, so "
            f"that hardly a draft is right; set {key} to false in the head's config.json"
        )
    for stored, tensor in head.stored.items():
        if stored.endswith(".bias") and canonical_name(stored) not in known and not is_zero(tensor):
            yield (
                f"{folder} has {stored} with values other than zero, which vLLM drops, so that it accepts fewer of its "
                "drafts; for vLLM use a head that was trained without it"
            )
    for key, value in switches(head.written):
        yield (
            f"{folder} has {key} {value}, which vLLM's class does not read, wanted {computed(key)}; if the head was "
            "trained with it, its drafts are poor"
        )
