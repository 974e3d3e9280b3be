"""Resolves the flags of ``--speculative-algorithm`` DFLASH and DSPARK: SGLang's own resolution ends where there is no
GPU.

SGLang has no trees for them: of the three flags of a tree it knows one, and sets the other two to 1. What the user gave
stays readable beside what was resolved. DSPARK is resolved to DFLASH, for which SGLang plans the same memory and passes
on the same states of the target; what is drafted of the block is ours.
"""

from __future__ import annotations

from typing import Any

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.block_config import ALGORITHM, MARKOV_ALGORITHM, block_rows, first_row, levels_of_block
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.policy.shapes import shape_for

STOCK_WIDTHS = {ALGORITHM: 16, MARKOV_ALGORITHM: 8}  # where neither a flag nor config.json says it, as in SGLang
STOCK_REQUESTS = 48  # at a time, where no flag says it, as in SGLang


def block_shape(server_args: Any, width: int, config: dict[str, Any]) -> Shape:
    """The caps of the trees of a drafter with this config.json; width: nodes that the target verifies.

    server_args: SGLang's, of which the flags are read as the user gave them.
    """
    levels = levels_of_block(config, width - 1)
    steps, topk = server_args.speculative_num_steps, server_args.speculative_eagle_topk
    return shape_for(width - 1, steps, topk, levels).within_steps(levels)


def asked_algorithm(server_args: Any, resolved: str) -> str:
    """The algorithm that the user named, where `resolve_on_cpu` has put another in its place; server_args as above."""
    asked = str(server_args.speculative_algorithm).upper()
    return asked if asked == MARKOV_ALGORITHM else resolved


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

    width, algorithm = arguments.speculative_num_draft_tokens, arguments.speculative_algorithm
    if width is None and algorithm == MARKOV_ALGORITHM and arguments.speculative_dspark_block_size:
        width = arguments.speculative_dspark_block_size + 1  # SGLang counts the drafted tokens there
    elif width is None and algorithm == ALGORITHM:
        width = arguments.speculative_dflash_block_size
    if width is None:
        width = STOCK_WIDTHS[algorithm]
        try:
            config = read_config(arguments.speculative_draft_model_path)
            if (rows := block_rows(config)) is not None:
                width = rows - first_row(config) + 1
        except HeadError:  # the check of the head comes next and says what is wrong
            pass
    declare_resolution(
        server_args,
        "eagle_plugin.block_flags",
        speculative_algorithm=ALGORITHM,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=width,
        max_running_requests=arguments.max_running_requests or STOCK_REQUESTS,
    )
    _disable_overlap_schedule_for_cpu(server_args)
