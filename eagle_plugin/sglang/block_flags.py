"""Resolves the flags of ``--speculative-algorithm DFLASH``: SGLang's own resolution ends where there is no GPU.

SGLang has no trees for it: of the three flags of a tree it knows one, and sets the other two to 1. What the user gave
stays readable beside what was resolved.
"""

from __future__ import annotations

from typing import Any

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.block_config import ALGORITHM, block_rows, levels_of_block
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.policy.shapes import shape_for

STOCK_ROWS = 16  # of a block, where neither a flag nor config.json says it, as in SGLang
STOCK_REQUESTS = 48  # at a time, where no flag says it, as in SGLang


def block_shape(server_args: Any, width: int, config: dict[str, Any]) -> Shape:
    """The caps of the trees of a drafter with this config.json; width: nodes that the target verifies.

    server_args: SGLang's, of which the flags are read as the user gave them.
    """
    levels = levels_of_block(config, width - 1)
    steps, topk = server_args.speculative_num_steps, server_args.speculative_eagle_topk
    return shape_for(width - 1, steps, topk, levels).within_steps(levels)


def caps_of(target_runner: Any) -> Shape:
    """The caps of a server's trees, as far as they are known before our worker is made."""
    from sglang.srt.runtime_context import get_spec

    spec, draft = get_spec(), target_runner.spec_aux_config.draft_model_config
    if spec.speculative_algorithm == ALGORITHM:
        return block_shape(target_runner.server_args, spec.speculative_num_draft_tokens, draft.hf_config.to_dict())
    return Shape(spec.speculative_num_steps, spec.speculative_eagle_topk, spec.speculative_num_draft_tokens)


def resolve_on_cpu(arguments: Any, server_args: Any) -> None:
    """What SGLang would set on a GPU, without its choice of an attention backend: ours serves all forwards."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.arg_groups.speculative_hook import _disable_overlap_schedule_for_cpu

    width = arguments.speculative_num_draft_tokens or arguments.speculative_dflash_block_size
    if width is None:
        try:
            width = block_rows(read_config(arguments.speculative_draft_model_path)) or STOCK_ROWS
        except HeadError:  # the check of the head comes next and says what is wrong
            width = STOCK_ROWS
    declare_resolution(
        server_args,
        "eagle_plugin.block_flags",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=width,
        max_running_requests=arguments.max_running_requests or STOCK_REQUESTS,
    )
    _disable_overlap_schedule_for_cpu(server_args)
