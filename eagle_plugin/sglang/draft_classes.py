"""Which classes of draft models SGLang serves without us, by the name in config.json."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache

HEAD_ARCHITECTURES = ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3")  # that our worker serves
# Heads that SGLang loads with classes of its own, by a part of the class's name.
_DRAFT_CLASS = re.compile(r"Eagle|NextN|MTP|Assistant|DSpark|Draft")


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
