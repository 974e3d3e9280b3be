"""What the target itself would say after every node of the verified trees.

At temperature 0 that is its argmax. Above, one token is drawn at every node from the target's own distribution by the
engine's own sampler; following the child that equals the draw is lossless, because the draws at different nodes are
independent and the walk looks at each node at most once. (Sampled draft children would accept more: a later version.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.utils.async_probe import sanitize_nan_logits


def needs_plain_round(batch: Any) -> bool:
    """Whether a request of this SGLang ``ScheduleBatch`` has a transform that depends on the path to a node.

    Penalties and custom logit processors read what was generated so far, which differs from node to node; such a batch
    decodes one token a round, with the engine's own transforms.
    """
    info = batch.sampling_info
    return (
        info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or info.has_custom_logit_processor
    )


def choose(
    runner: Any, batch: Any, output: Any, positions: torch.Tensor, width: int, grammar_mask: Any
) -> torch.Tensor:
    """The target's choice after each node.

    runner is the target's SGLang ``ModelRunner``; output.next_token_logits [b * W, V] float32 is transformed in place
    (bias and grammar; not by temperature, so that log probabilities can still be read from it); positions is [b * W]
    int64. Returns [b, W] int64.
    """
    info = batch.sampling_info
    logits = output.next_token_logits
    sanitize_nan_logits(logits, "eagle-plugin verify: target logits")
    if info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None:
        info._apply_pre_grammar_logits_transforms(logits)  # one row a request: needs_plain_round() saw to it
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, dim=0))
    if info.is_all_greedy and not info.has_custom_logit_processor:
        return logits.argmax(dim=-1).view(-1, width)
    drawn = runner.sampler(
        # The sampler turns logits into probabilities in place; log probabilities are computed later from `output`.
        dataclasses.replace(output, next_token_logits=logits.clone()),
        _per_node(info, width),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=positions,
    )
    return drawn.long().view(-1, width)


def _per_node(info: Any, width: int) -> Any:
    """The sampling parameters of each request, once a node; the transforms of the logits are done already."""
    if width == 1:
        return info

    def repeat(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(width, dim=0)

    return dataclasses.replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        logit_bias=None,
        grammars=None,
    )
