"""What SGLang's scheduler gets of a decode round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor
from torch.utils._pytree import tree_map_only

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.drafter import DraftState


@dataclass
class RoundResult(GenerationBatchResult):
    """The engine's result of a round, why a part of it ran without graphs on a server that has them, and its shape."""

    eager_reasons: Sequence[str] = ()
    served: ServedRound | None = None


def round_result(
    inputs: RoundBatch,
    kept: Accepted,
    new_lens: Tensor,
    state: DraftState,
    logprobs: LogitsProcessorOutput | None,
    features: Tensor | None,
    captured: bool,
    carried: Callable[[DraftState, Tensor], Any],
) -> RoundResult:
    """The result of a round of b requests: copies, where it was `captured` and the next one overwrites the memory.

    features [b * E, H]: the target's states of the accepted paths, if they were asked for. carried: as of
    `TreeDrafter.carried`.
    """
    b, shape = inputs.b, inputs.shape

    def own(values: Tensor) -> Tensor:
        return values.clone() if captured else values

    output = logprobs or LogitsProcessorOutput(next_token_logits=None)
    if features is not None:
        output.hidden_states = features
    after = tree_map_only(Tensor, lambda values: own(values[:b]), state)
    return RoundResult(
        logits_output=output,
        next_token_ids=own(kept.tokens).view(-1),
        can_run_cuda_graph=captured,
        speculative_num_draft_tokens=shape.width,
        speculative_output_stride=shape.max_accept_length,
        accept_lens=own(kept.lengths),
        new_seq_lens=new_lens,
        next_draft_input=carried(after, new_lens),
    )


def idle_result(shape: Shape, new_seq_lens: Tensor) -> RoundResult:
    """The result of a round without requests; new_seq_lens [0]."""
    nothing = torch.zeros(0, dtype=torch.int64, device=new_seq_lens.device)
    return RoundResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=nothing,
        speculative_num_draft_tokens=shape.width,
        speculative_output_stride=shape.max_accept_length,
        accept_lens=nothing.int(),
        new_seq_lens=new_seq_lens,
        next_draft_input=EagleDraftInput(bonus_tokens=nothing.int()),
    )
