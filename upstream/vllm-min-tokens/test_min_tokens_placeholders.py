# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""min_tokens with the placeholders of asynchronous scheduling and drafts."""

import pytest
import torch

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

CPU = torch.device("cpu")
STOP, VOCAB_SIZE = 7, 10


def batch_with_min_tokens(output: list[int], min_tokens: int):
    processor = MinTokensLogitsProcessor(None, CPU, False)
    batch = InputBatch(
        max_num_reqs=2,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=CPU,
        vocab_size=VOCAB_SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
        logitsprocs=LogitsProcessors([processor]),
    )
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=[STOP], max_tokens=32)
    request = CachedRequestState(
        req_id="0",
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=params,
        generator=None,
        block_ids=([0],),
        num_computed_tokens=2,
        output_token_ids=output,
    )
    batch.add_request(request)
    batch.refresh_metadata()
    return batch, processor


def test_rejected_drafts_are_not_counted():
    output: list[int] = []
    batch, processor = batch_with_min_tokens(output, 4)
    # One token, and three drafts of the step before as if all were accepted.
    output += [5, -1, -1, -1, -1]
    batch.refresh_metadata()
    # One was: this is what update_async_output_token_ids() makes of the output.
    output[1:] = [6, 5]
    logits = processor.apply_with_spec_decode(torch.zeros(2, VOCAB_SIZE), [2])
    assert logits[:, STOP].tolist() == [-float("inf"), 0.0]
    assert processor.apply(torch.zeros(1, VOCAB_SIZE))[0, STOP] == -float("inf")


@pytest.mark.parametrize("generated", [3, 4])
def test_placeholder_of_the_sampled_token_is_counted(generated: int):
    output: list[int] = []
    batch, processor = batch_with_min_tokens(output, 4)
    output += [-1] * generated  # without drafts, one per token
    batch.refresh_metadata()
    is_masked = processor.apply(torch.zeros(1, VOCAB_SIZE))[0, STOP] == -float("inf")
    assert is_masked == (generated < 4)


def test_placeholders_are_corrected_for_min_tokens():
    batch, _ = batch_with_min_tokens([], 4)
    assert batch.sampling_metadata.output_token_ids == [[]]
