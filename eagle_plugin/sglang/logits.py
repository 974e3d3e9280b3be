"""The target's logits after every node of the verified trees, with what the requests ask for applied."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.utils.async_probe import sanitize_nan_logits

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.penalties import NodePenalties, penalised


def needs_plain_round(batch: Any) -> bool:
    """Whether a request of this SGLang ``ScheduleBatch`` can only be served one token per round.

    A custom logit processor may read the state of its request, which deeper nodes of a tree do not have.
    """
    return bool(batch.sampling_info.has_custom_logit_processor)


def sanitize(logits: torch.Tensor) -> None:
    """Replace NaN and infinite logits as the engine does, in place, and without its warning: it may be captured."""
    if envs.SGLANG_SANITIZE_NAN_LOGITS.get():
        torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)


def transforms_of(batch: Any) -> list[str]:
    """What the requests of this ``ScheduleBatch`` ask for beyond temperature and filters; it cannot be captured."""
    info = batch.sampling_info
    asked = {
        "penalties": penalised(batch),
        "grammar": batch.has_grammar,
        "logit bias": info.logit_bias is not None,
        "custom logit processor": info.has_custom_logit_processor,
    }
    return [name for name, given in asked.items() if given]


def transform_logits(
    batch: RoundBatch,
    schedule_batch: Any,
    tree: DraftTree,
    logits: torch.Tensor,
    penalties: NodePenalties,
    grammar_mask: Any,
) -> None:
    """Apply everything but temperature and filters in place, in the engine's order, at every node.

    logits [b * W, V] float32, row i * W + j after node j of request i; grammar_mask has one row per node, or is None.
    """
    info = schedule_batch.sampling_info
    if penalised(schedule_batch):
        penalties.apply(batch, tree, logits)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(tree.tokens.shape[1], dim=0))
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info)  # one node per request, see needs_plain_round()
    sanitize_nan_logits(logits, "eagle-plugin verify: target logits")
