"""Requests say whether they have drafts, and what from, in one batch with others; test_lookup.py has the cases of
servers that look branches up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm_engines import drafted_shapes, engine, generate, rounds, runner
from vllm_greedy import GreedyModels, make_prompts, write_models
from vllm_mixed import FIELDS, HEAD, LOOKUP, OFF, check_mixed, run_mixed

from eagle_plugin.core.shape import PLAIN
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.vllm.request_fields import MIDDLEWARE, AskedSources, add_requests_middleware

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
PROMPTS = [[*prompt, *prompt] for prompt in make_prompts(12, longest=45)]
# What changes the logits at each node of a tree.
PARAMETERS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"logprobs": 2, "temperature": 1.0, "seed": 5},
    {"structured_outputs": StructuredOutputsParams(regex="[ -~]{24}"), "detokenize": True, "ignore_eos": False},
]
MATRIX = pytest.mark.matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GreedyModels:
    return write_models(tmp_path_factory.mktemp("by-request"), PROMPTS)


@contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with recording_launches():
        yield


@MATRIX
@pytest.mark.parametrize(
    ("head", "asynchronous", "policy", "lookup", "graphs"),
    [
        pytest.param("reduced", False, "random", False, False, id="one step at a time"),
        pytest.param("reduced", True, "fixed", True, True, id="graphs"),
        pytest.param("peagle", True, "random", True, True, id="graphs, all levels at once"),
        pytest.param("reduced", True, "auto", True, False, id="the policy"),
    ],
)
def test_mixed_batches(
    models: GreedyModels,
    head: str,
    asynchronous: bool,
    policy: str,
    lookup: bool,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if lookup:
        monkeypatch.setenv("EAGLE_LOOKUP", "on")
    plugin = {"async_scheduling": asynchronous}
    with (
        emulated(monkeypatch) if graphs else nullcontext(),
        engine(models.target, models.heads[head], policy=policy, **TREES, plugin=plugin) as llm,
    ):
        always = policy != "auto"
        check_mixed(llm, PROMPTS, models.expected, lookup, always)
        before = rounds(llm)
        with drafted_shapes(llm) as shapes:
            assert run_mixed(llm, PROMPTS, [OFF]) == models.expected
        # Scheduled ahead, the first step still has the shape that was wanted before.
        drafted = sum(count for shape, count in shapes.items() if shape != PLAIN)
        assert drafted <= (2 if asynchronous else 0) and shapes[PLAIN] > 40
        assert rounds(llm, before).count == 0, "a request without drafts was counted"
        assert generate(llm, PROMPTS) == models.expected
        assert rounds(llm, before).count > 0 or not always
        for more in PARAMETERS:  # the same for each, whatever it is drafted from
            answers = run_mixed(llm, [PROMPTS[1]] * len(FIELDS), FIELDS, **more)
            assert answers == [answers[0]] * len(FIELDS) and len(set(answers[0])) > 3, more
        if graphs:
            assert runner(llm)._step.functions.replays > 40
        for wrong in ({"draft": "no"}, {"sources": []}, "off"):
            with pytest.raises(VLLMValidationError, match=r"eagle_plugin.* is .*, wanted "):
                run_mixed(llm, PROMPTS[:1], [wrong])
        assert run_mixed(llm, PROMPTS[:4], FIELDS) == models.expected[:4]


@MATRIX
def test_the_check_sees_drafts_that_nobody_asked_for(models: GreedyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the cases above: a worker that ignores what is asked for."""
    with engine(models.target, models.heads["reduced"], **TREES) as llm:
        monkeypatch.setattr(AskedSources, "limits", lambda *_: None)
        with pytest.raises(AssertionError, match="draft"):
            check_mixed(llm, PROMPTS, models.expected, lookup=False)


def asked_by(name: str, field: Any, grammar: bool = False) -> Any:
    """A vLLM ``NewRequestData``."""
    params = SimpleNamespace(extra_args={"eagle_plugin": field}, structured_outputs="json" if grammar else None)
    return SimpleNamespace(req_id=name, sampling_params=params)


def test_which_requests_have_limits() -> None:
    asked = AskedSources(torch.device("cpu"), chains=True)
    assert asked.limits(["a", "b"]) is None
    pooled = SimpleNamespace(req_id="pooled", sampling_params=None)
    several = [asked_by("a", OFF), asked_by("b", HEAD), asked_by("c", LOOKUP), asked_by("d", LOOKUP, grammar=True)]
    asked.begin([*several, asked_by("e", LOOKUP), asked_by("f", {"wrong": 1}), pooled], lambda name: name != "e")
    names = list("abcdef")
    limits = asked.limits(names)
    assert limits is not None
    # Chains are not looked up, and a request may have no row; what cannot be read says nothing.
    assert limits.without.tolist() == [0, 3, 4] and limits.looked_up.tolist() == [2] and limits.drafting == [1, 2, 5]
    in_prompts = np.array([False, True, True, False, False, False])
    limits = asked.limits(names, in_prompts)
    assert limits is not None and limits.without.tolist() == [0, 2, 3, 4] and not len(limits.looked_up)
    assert asked.limits(["b", "f"]) is None
    asked.forget(names)
    assert asked.limits(names) is None and not asked._asked


def test_a_request_that_goes_on_with_more_input_asks_anew() -> None:
    """vLLM's resumable requests: each turn has its own parameters."""
    asked = AskedSources(torch.device("cpu"), chains=True)
    for field, is_limited in ((OFF, True), ({}, False), (LOOKUP, True), (HEAD, False)):
        asked.begin([asked_by("a", field)], lambda name: True)
        assert (asked.limits(["a"]) is not None) is is_limited


def test_the_middleware_is_added_to_servers_once() -> None:
    server, other = SimpleNamespace(middleware=["users.own"]), SimpleNamespace(model="m")
    for _ in range(2):
        add_requests_middleware(server)
        add_requests_middleware(other)
    assert server.middleware == ["users.own", MIDDLEWARE] and vars(other) == {"model": "m"}
    module, _, name = MIDDLEWARE.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name).parameters == "vllm_xargs"
