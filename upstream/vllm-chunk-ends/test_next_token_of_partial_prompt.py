# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the drafter reads beside the last row of a part of a prompt."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

DEVICE = torch.device(current_platform.device_type)
PROMPT = list(range(100, 120))
READ = 8  # of the first request


class Stop(Exception):
    pass


def test_next_token_follows_the_part():
    current_platform.register_triton_kernel_overrides()
    drafter = EagleProposer.__new__(EagleProposer)
    drafter.backup_next_token_ids = CpuGpuBuffer(2, dtype=torch.int32, device=DEVICE)
    discarded = torch.tensor([True, False], device=DEVICE)
    request = SimpleNamespace(get_token_id=lambda index: PROMPT[index])
    seen = []

    def stop(next_token_ids: torch.Tensor, _: torch.Tensor) -> None:
        seen.extend(next_token_ids.tolist())
        raise Stop

    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="eagle3",
            disable_padded_drafter_batch=False,
            use_eagle=lambda: True,
            use_ngram_gpu=lambda: False,
            uses_extract_hidden_states=lambda: False,
        ),
        drafter=drafter,
        requests={"partial": request, "complete": request},
        input_batch=SimpleNamespace(
            num_reqs=2,
            req_ids=["partial", "complete"],
            num_tokens_no_spec=torch.tensor([len(PROMPT)] * 2).numpy(),
            vocab_size=1000,
        ),
        discard_request_mask=SimpleNamespace(gpu=discarded),
        optimistic_seq_lens_cpu=torch.tensor([READ, len(PROMPT)], dtype=torch.int32),
        _copy_valid_sampled_token_count=stop,
    )
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=READ + len(PROMPT), num_spec_tokens_to_schedule=3
    )
    sampled = torch.tensor([[3, -1], [7, -1]], dtype=torch.int32, device=DEVICE)
    with pytest.raises(Stop):
        GPUModelRunner.propose_draft_token_ids(runner, scheduled, sampled, *[None] * 7)
    assert seen == [PROMPT[READ], 7]
