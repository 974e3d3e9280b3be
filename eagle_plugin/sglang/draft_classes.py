"""Which classes of draft models SGLang serves without us, by the name in config.json."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from functools import cache
from typing import Any

from eagle_plugin.heads.kinds import HEAD_ARCHITECTURES

# MTP (NextN) layers that targets bring along and our worker serves: SGLang's class for them, by that of the
# target. One layer with ordinary attention, which SGLang's class computes on the last state of the target, drafts all
# levels, as an EAGLE-2 head does.
MTP_LAYERS = {
    "MiMoForCausalLM": "MiMoMTP",
    "Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3MoeForCausalLM": "Qwen3MoeForCausalLMMTP",
    "Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN",
}
# Heads that SGLang loads with classes of its own, by a part of the class's name.
_DRAFT_CLASS = re.compile(r"Eagle|NextN|MTP|Assistant|DSpark|Draft")


def is_mtp_layer(architecture: str) -> bool:
    """Whether this class of a draft model is an MTP layer of a target's own that our worker serves."""
    return architecture in MTP_LAYERS.values()


def drafts_by_own_layer(arguments: Any) -> bool:
    """Whether SGLang looks for what drafts in the target's own files; arguments: of the server, resolved."""
    target, head = arguments.model_path, arguments.speculative_draft_model_path
    return head is None or os.path.realpath(head) == os.path.realpath(target)


def unsupported_draft_class(architecture: str) -> list[str]:
    """Why our worker does not draft by this class of a draft model; empty where it does."""
    if architecture in HEAD_ARCHITECTURES or is_mtp_layer(architecture):
        return []
    if re.search("NextN|MTP", architecture):
        served = ", ".join(dict.fromkeys(MTP_LAYERS.values()))
        return [f"MTP layer {architecture}: not one of {served}"]
    return [f"draft head {architecture}: not one of {', '.join(HEAD_ARCHITECTURES)}"]


def unsupported_mtp_layers(arguments: Any, draft_config: Any) -> list[str]:
    """Why our worker does not draft by the MTP layer of a target; empty where it does, or drafts by a head.

    arguments: resolved, of the server. draft_config: SGLang's ``ModelConfig`` of what drafts.
    """
    name = draft_config.hf_config.architectures[0]
    if not is_mtp_layer(name):
        return []
    reasons, layers = [], draft_config.num_nextn_predict_layers or 1
    if arguments.speculative_algorithm != "EAGLE":
        reasons.append(
            f"MTP layer {name} with --speculative-algorithm {arguments.speculative_algorithm}: it reads the "
            "last state of the target, which EAGLE and NEXTN give it"
        )
    if layers > 1:
        reasons.append(f"MTP layer {name}: {layers} layers, of which each drafts one level; one is served")
    if (arguments.attn_dp_size or 1) > 1:
        reasons.append(f"MTP layer {name} with --attn-dp-size {arguments.attn_dp_size}: not served yet")
    return reasons


def has_own_draft_class(architecture: str) -> bool:
    """Whether SGLang serves a head whose config.json names this class with a class other than ours."""
    if architecture in HEAD_ARCHITECTURES:
        return False
    dots3 = architecture.startswith("Dots3")  # known to the engine by its configuration's class
    return dots3 or bool(_DRAFT_CLASS.search(architecture)) or architecture in targets_with_drafts()


@cache
def targets_with_drafts() -> frozenset[str]:
    """The classes of targets that bring their draft layers along: a head's folder may then be the target's.

    SGLang makes the name of the draft's class from that of the target; what it compares with is read from its source.
    """
    from sglang.srt.configs import model_config

    source = ast.parse(textwrap.dedent(inspect.getsource(model_config.ModelConfig._config_draft_model)))
    names: set[str] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.hf_config.architectures[0]":
            (compared,) = node.comparators
            is_name = isinstance(compared, ast.Name)  # of a list beside the class
            found = getattr(model_config, ast.unparse(compared)) if is_name else ast.literal_eval(compared)
            names |= {found} if isinstance(found, str) else set(found)
    return frozenset(names)
