# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A budget must not stay at the place of a request that has left the batch."""

from types import SimpleNamespace

import torch

from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


def test_move_without_budget_clears_the_destination():
    reasoning_config = SimpleNamespace(
        reasoning_start_token_ids=[1], reasoning_end_token_ids=[2]
    )
    holder = ThinkingBudgetStateHolder(
        reasoning_config, 4, 0, torch.device("cpu"), False
    )
    budget = SamplingParams(thinking_token_budget=5)
    added = [(0, budget, [1], []), (1, SamplingParams(), [1], [])]
    holder.sync_batch(BatchUpdate(2, removed=[], added=added, moved=[]))
    assert holder.has_tracked_requests()

    # Request 0 has finished; request 1, which has no budget, takes its place.
    moved = [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]
    holder.sync_batch(BatchUpdate(1, removed=[], added=[], moved=moved))
    assert not holder.has_tracked_requests()
