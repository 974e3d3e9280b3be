"""Data-parallel attention (``--attn-dp-size``): ranks with requests of their own run the target's forwards together.

Attention reads the requests of one rank. Before its other layers (MLP, experts, output layer) the target gathers the
rows of all ranks, so that all must run as many forwards, and each must know how many rows the others have. Here it is
the same number: the ranks agree on one width of the trees and one size of the padded batch, and a rank without requests
runs a round of padding. The head is not divided among these ranks: one without requests does not run it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.dp_attention import DpPaddingMode, set_dp_buffer_len_from_batch, set_is_extend_in_batch
from sglang.srt.runtime_context import get_parallel
from torch import distributed

from eagle_plugin.core.shape import Shape


class SharedRounds:
    """What the ranks of data-parallel attention agree on before a round; one rank agrees with itself."""

    def __init__(self) -> None:
        parallel = get_parallel()
        self._group, self._is_shared = parallel.tp_group, parallel.attn_dp_size > 1

    def agree(self, shape: Shape, b: int, must_be_shape: bool = False) -> tuple[Shape, int]:
        """The shape of the round, and the most requests that a rank has; to be called by all ranks, every round.

        The shape is that of the rank with the most requests, whose round takes longest, unless a rank can run no other
        than its own. shape: what this rank wants for its b requests. It waits for the hosts of the other ranks, as the
        engine's scheduler does once per round.
        """
        if not self._is_shared:
            return shape, b
        mine = torch.tensor([b, int(must_be_shape), *shape])
        everyones = [torch.empty_like(mine) for _ in range(self._group.world_size)]
        distributed.all_gather(everyones, mine, group=self._group.cpu_group)
        rows = [row.tolist() for row in everyones]
        chosen = max(rows, key=lambda row: (row[1], row[0]))  # the first of equals, on every rank
        return Shape(*chosen[2:]), max(row[0] for row in rows)


def spread_rows(runner: Any, forward_batch: Any, replicas: int) -> None:
    """Tell the layers of a target that all ranks run this forward with as many rows; what the runner tells them else.

    forward_batch: an SGLang ``ForwardBatch``; replicas: ranks of data-parallel attention.
    """
    tokens = forward_batch.input_ids
    rows = len(tokens)
    counts = [rows] * replicas
    counts_on_device = torch.full((replicas,), rows, dtype=torch.int64, device=tokens.device)
    forward_batch.global_num_tokens_cpu = forward_batch.global_num_tokens_for_logprob_cpu = counts
    forward_batch.global_num_tokens_gpu = forward_batch.global_num_tokens_for_logprob_gpu = counts_on_device
    forward_batch.dp_padding_mode = DpPaddingMode.MAX_LEN
    forward_batch.global_dp_buffer_len = rows * replicas
    forward_batch.attn_tp_sequence_sharded = runner.attn_tp_sequence_sharded(rows)
    set_dp_buffer_len_from_batch(forward_batch)
    set_is_extend_in_batch(False)
