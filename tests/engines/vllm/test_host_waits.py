"""Decode steps of real engines ask no tensor for its value where they are ours: on a GPU the host would wait there.

On a CPU nothing waits, so what would is named by what Python asks of tensors (tests/support/host_waits.py), in the
runner's methods that ours replace (tests/support/vllm_host_waits.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLM
from vllm_engines import engine, generate, runner
from vllm_greedy import make_prompts, write_heads, write_target
from vllm_host_waits import Guard

from eagle_plugin.runtime.graph_emulator import recording_launches

PROMPTS = make_prompts(8)
FILTERED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": FILTERED,
    "seeded": FILTERED | {"seed": 3},
    "penalised": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    "biased": {"logit_bias": {70: 4.0}},
    "of a minimal length": {"min_tokens": 20, "ignore_eos": False},
    "log probabilities": {"logprobs": 2},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("waits")
    target = write_target(folder)
    head = write_heads(folder, target)["reduced"]
    with graphs(), engine(target, head, depth=3, topk=4, nodes=16, plugin={"async_scheduling": True}) as made:
        yield made


@contextmanager
def graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, recording_launches():
        patch.setenv("EAGLE_GRAPHS", "emulate")
        yield


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind_of_request(llm: LLM, kind: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served = runner(llm)
    if not captured:
        monkeypatch.setattr(served, "_step", None)
    guard = Guard(served, monkeypatch)
    generate(llm, PROMPTS, max_tokens=40, **KINDS[kind])
    assert guard.steps >= 10
    assert guard.findings == {}


def test_the_control_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads one value."""
    served, sample = runner(llm), runner(llm)._sample

    def waiting(logits: Any, metadata: Any) -> Any:
        assert int(served._state.batch.prefix_lens[0]) >= 0
        return sample(logits, metadata)

    monkeypatch.setattr(served, "_sample", waiting)
    guard = Guard(served, monkeypatch)
    generate(llm, PROMPTS[:2], max_tokens=8)
    assert any("test_host_waits.py" in finding for finding in guard.findings)
