"""Decode steps of real engines ask no tensor for its value where they are ours: on a GPU the host would wait there.

On a CPU nothing waits, so what would is named by what Python asks of tensors (tests/support/host_waits.py), in the
runner's methods that ours replace (tests/support/vllm_host_waits.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm_engines import engine, generate, runner
from vllm_greedy import make_prompts, write_heads, write_target
from vllm_host_waits import Guard

from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm.runner import TreeModelRunner

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


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner that is scheduled ahead, with room for 3 requests of 7 drafts on the host."""
    nothing = SimpleNamespace(wait_stream=lambda _: None, record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    made: Any = TreeModelRunner.__new__(TreeModelRunner)
    vars(made).update(
        use_async_scheduling=True,
        num_spec_tokens=7,
        prev_num_spec_tokens=7,
        input_batch=SimpleNamespace(req_ids=["a", "b"], sampling_metadata=SimpleNamespace(output_token_ids=[[5], [6]])),
        draft_token_ids_copy_stream=nothing,
        draft_token_ids_event=nothing,
        _draft_token_req_ids=None,
        _drafts_on_host=torch.full((21,), -1),
        _sampled=None,
    )
    return made


def test_penalties_need_no_drafts_on_the_host(copying: Any) -> None:
    """vLLM's own worker copies them, for penalties at its drafts; ours are computed on the device."""
    copying._draft_token_ids = torch.arange(8).view(2, 4)[:, 1:]
    copying._copy_draft_token_ids_to_cpu(SimpleNamespace(has_structured_output_requests=False))
    assert copying.take_draft_token_ids() is None and copying.prev_num_spec_tokens == 3
    assert copying._drafts_on_host.tolist() == [-1] * 21


@pytest.mark.parametrize("ahead", [True, False])
def test_drafts_on_the_host_lie_side_by_side(copying: Any, ahead: bool) -> None:
    """A copy to places with gaps between them goes through other memory, for which the host waits."""
    copying.use_async_scheduling = ahead
    for width in (3, 7, 0, 2):
        tokens = torch.arange(2 * (width + 1)).view(2, width + 1)[:, 1:]
        copying._draft_token_ids = tokens
        copying._copy_draft_token_ids_to_cpu(SimpleNamespace(has_structured_output_requests=ahead))
        assert copying.draft_token_ids_cpu.is_contiguous() and copying.draft_token_ids_cpu.dtype == tokens.dtype
        assert copying.draft_token_ids_cpu.data_ptr() == copying._drafts_on_host.data_ptr() or not width
        drafts = copying.take_draft_token_ids()
        assert drafts.req_ids == ["a", "b"] and drafts.draft_token_ids == tokens.tolist()
        assert copying.prev_num_spec_tokens == width
    copying._copy_draft_token_ids_to_cpu(SimpleNamespace(has_structured_output_requests=ahead), zeros_only=True)
    assert copying.take_draft_token_ids().draft_token_ids == [[0, 0], [0, 0]]
