# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A token that is sampled after a part of a prompt, and thrown away."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU generators")
def test_discarded_token_leaves_the_generator_alone():
    generators = {i: torch.Generator().manual_seed(i) for i in range(2)}
    before = [generator.get_state() for generator in generators.values()]

    def sample(logits, sampling_metadata):
        rows = [torch.randint(9, (1,), generator=g) for g in generators.values()]
        return SamplerOutput(torch.stack(rows), None)

    runner = CPUModelRunner.__new__(CPUModelRunner)
    runner.__dict__ |= {
        "sampler": sample,
        "use_async_scheduling": False,
        "max_model_len": 16,
        "discard_request_mask": SimpleNamespace(np=np.array([True, False])),
        "requests": {name: SimpleNamespace(output_token_ids=[]) for name in "ab"},
        "input_batch": SimpleNamespace(
            num_reqs=2,
            generators=generators,
            sampling_metadata=None,
            update_async_output_token_ids=lambda: None,
            req_ids=["a", "b"],
            req_id_to_index={"a": 0, "b": 1},
            num_tokens_no_spec=np.array([8, 8]),
            token_ids_cpu=np.zeros((2, 16), dtype=np.int32),
            is_token_ids=np.zeros((2, 16), dtype=bool),
        ),
        "_get_prompt_logprobs_dict": lambda *_: {},
    }
    output = runner._sample(torch.zeros(2, 9), None)
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 4})
    _, _, _, tokens, *_ = runner._bookkeeping_sync(
        scheduled, output, None, torch.zeros(8, 1), 8
    )
    assert len(tokens[0]) == 0 and len(tokens[1]) == 1
    advanced = [
        not torch.equal(generator.get_state(), state)
        for generator, state in zip(generators.values(), before)
    ]
    assert advanced == [False, True]
