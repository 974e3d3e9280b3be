"""The head of the examples in vLLM's own engine: the text of plain decoding, and drafts that are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from eagle_plugin.models.store import get_model

pytestmark = pytest.mark.server

HEAD = Path(__file__).parents[2] / "examples/heads/smollm2-135m-instruct-eagle3"
QUESTIONS = ["Why is the sky blue?", "Tom has 12 apples and gives 4 away. How many are left?"]
PROMPTS = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]


def generate(**options: Any) -> tuple[list[list[int]], dict[str, float]]:
    """24 greedy tokens a prompt, and vLLM's counters."""
    engine = LLM(
        str(get_model("smollm2-135m-instruct")),
        dtype="float32",  # in bfloat16 near-ties part the texts
        max_model_len=512,
        max_num_seqs=2,
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )
    settings = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = engine.generate(PROMPTS, settings, use_tqdm=False)
    counters = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    return [list(answer.outputs[0].token_ids) for answer in answers], counters


def test_greedy_text_equals_plain_decoding() -> None:
    plain, _ = generate()
    drafted, counters = generate(
        speculative_config={"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 3}
    )
    assert drafted == plain
    rounds, accepted = (counters[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    # Measured about 1.5 tokens a round (the head's card); with misread drafts next to nothing is accepted.
    assert 1 + accepted / rounds > 1.25
