"""Whether a head fits its target, asked before a server starts.

The engine alone, which a benchmark starts beside the plugin, checks neither: it ends with a traceback after it has
loaded the target.
"""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.bench.spec import EngineName
from eagle_plugin.heads.block_config import is_block_drafter
from eagle_plugin.heads.block_drafter import SGLANG, VLLM, describe_block
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError, LeftToEngine, read_config
from eagle_plugin.heads.kinds import HEAD_ARCHITECTURES, served_algorithm
from eagle_plugin.heads.vllm_rules import describe_head


def check_fits(target: Path, head: Path, engine: EngineName | None = None) -> None:
    """Raise where no worker of the engine can serve the head for the target; both are folders with a config.json.

    engine: None: one of them has to.

    Raises:
        HeadError: for the first thing that does not fit, by the rules of the engine, or of the first that was asked.
    """
    faults = [_fault(target, head, asked) for asked in ((engine,) if engine else ("sglang", "vllm"))]
    first = faults[0]
    if first is not None and all(faults):
        raise first


def _fault(target: Path, head: Path, engine: EngineName) -> HeadError | None:
    try:
        config = read_config(head)
        if is_block_drafter(config):
            describe_block(target, head, SGLANG if engine == "sglang" else VLLM)
        elif engine == "vllm":
            describe_head(target, head)
        elif _is_ours(config.get("architectures"), read_config(target).get("architectures")):
            # What SGLang reads otherwise than it was trained is a warning in the log of the server.
            check_head(target, head, algorithm=served_algorithm(config), misread=lambda sentence: None)
    except LeftToEngine:
        return None
    except HeadError as error:
        return error
    return None


def _is_ours(classes: object, of_target: object) -> bool:
    """Whether the classes in a head's config.json are those of our worker, without which SGLang loads the others; the
    target's own are a mistake."""
    return not classes or classes == of_target or (isinstance(classes, list) and classes[0] in HEAD_ARCHITECTURES)
