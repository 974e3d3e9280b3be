"""Tells a user whose command allows chains alone on a GPU how the same server would draft trees.

Published commands of SGLang give 3/1/4 for nearly every head, which is right for SGLang's own worker; the flags are the
caps of the plugin's trees. And with some attention backends SGLang takes chains alone.
"""

from __future__ import annotations

from typing import Any

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.target_table import SGLANG_CHAINED
from eagle_plugin.sglang.preflight import can_have_trees

FLAGS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")


def change_for_trees(server_args: Any, caps: Shape) -> str | None:
    """What to change in the command of a server that the plugin serves with these caps; None where nothing helps.

    server_args: SGLang's, resolved, of which the flags are read as the user gave them too.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolved_view

    if caps.topk > 1:
        return None
    arguments = resolved_view(server_args)
    if arguments.device != "cuda" or arguments.speculative_algorithm not in ("EAGLE", "EAGLE3"):
        return None
    architecture = model_config_of(server_args).hf_config.architectures[0]
    changes = []
    if server_args.speculative_eagle_topk == 1:
        changes.append(f"leave out {', '.join(FLAGS[:2])} and {FLAGS[2]}")
    if "trtllm_mha" in attention_backends_of(arguments) and architecture in SGLANG_CHAINED:
        changes.append("add --attention-backend triton")
    backends = (*attention_backends_of(server_args), server_args.speculative_draft_attention_backend)
    if not changes or not can_have_trees(server_args, arguments, backends, server_args.page_size):
        return None
    why = "the plugin drafts trees then, and with this command chains alone"
    return f"{' and '.join(changes)}: {why}"
