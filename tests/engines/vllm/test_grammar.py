"""Structured outputs under speculation: every answer is valid, and greedy ones are those of plain decoding."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from bigram_models import bigram_target
from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_bigram import ASYNC, OPTIONS, PROMPTS, TREES, Acceptance, ask, endings, write_models, write_peagle
from vllm_configs import DEFAULTS
from vllm_engines import core, engine, runner

from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.grammar import mask_nodes, note_parents, with_parents
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.verifier import TreeVerifier

BOOLEAN = {"type": "boolean"}
# Every schema bounds its text: a random model would never close an open string or list by itself.
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, "lit": BOOLEAN, "kind": {"const": "lamp"}},
        "required": ["colour", "lit", "kind"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": [0, 1, "x", None]}},
    },
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "note": {"type": "string", "maxLength": 6},
            "more": {"type": "object", "properties": {"ok": BOOLEAN}, "required": ["ok"]},
        },
        "required": ["name", "more"],
        "additionalProperties": False,
    },
]
REGEX = r"[0-9]{3}-(cat|dog){1,3}[a-f]{2,4}"
EBNF = 'root ::= ("yes" | "no") " " [0-9] [0-9]? ("," root)?'
CHOICES = ["red lamp", "green lamp", "blue"]
WORDS = r"[ -~]{24}"  # nearly what the model says by itself: drafts are accepted
CONSTRAINTS: dict[str, dict[str, Any]] = {f"schema {i}": {"json": schema} for i, schema in enumerate(SCHEMAS)} | {
    "regex": {"regex": REGEX},
    "grammar": {"grammar": EBNF},
    "choice": {"choice": CHOICES},
    "words": {"regex": WORDS},
}
# The model by itself writes on after these, in the middle of a tree.
SHORT: dict[str, dict[str, Any]] = {f"{n} characters": {"regex": f"[ -~]{{{n}}}"} for n in (2, 3, 4)}
# With the end all but certain wherever it is allowed, a text has just its minimal length, or the grammar's.
ENDING = {"logit_bias": {1: 50.0}}
MINIMAL: dict[str, tuple[dict[str, Any], int]] = {
    "longer than the grammar's": ({"regex": "[a-f]{2,30}", "min_tokens": 11}, 11),
    "shorter than the grammar's": ({"regex": "[a-f]{7,30}", "min_tokens": 3}, 7),
    "longer than the grammar allows": ({"regex": "[a-f]{5}", "min_tokens": 20}, 5),
}


def constrained(constraint: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    made = StructuredOutputsParams(**constraint)
    return {"structured_outputs": made, "max_tokens": 120, "ignore_eos": False, "detokenize": True} | sampling


def minimal(name: str) -> dict[str, Any]:
    wanted, _ = MINIMAL[name]
    return constrained({"regex": wanted["regex"]}, min_tokens=wanted["min_tokens"], **ENDING)


def valid(name: str, text: str) -> None:
    """Raise unless the text keeps to the constraint of this name."""
    if name.startswith("schema"):
        jsonschema.validate(json.loads(text), CONSTRAINTS[name]["json"])
    elif name == "choice":
        assert text in CHOICES
    elif name == "grammar":
        assert re.fullmatch(r"((yes|no) \d\d?)(,(yes|no) \d\d?)*", text), text
    else:
        assert re.fullmatch(CONSTRAINTS[name]["regex"], text), text


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> tuple[Path, Path]:
    return write_models(checkpoints)


def options() -> dict[str, Any]:
    backend = {"backend": "xgrammar", "disable_any_whitespace": True}  # else spaces for ever
    return OPTIONS | {"structured_outputs_config": backend}


def greedy(llm: LLM, name: str) -> list[RequestOutput]:
    setting = minimal(name) if name in MINIMAL else constrained((CONSTRAINTS | SHORT)[name])
    return ask(llm, PROMPTS, [setting] * len(PROMPTS))


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> dict[str, list[tuple[Any, ...]]]:
    with engine(models[0], **options()) as plain:
        return {name: endings(greedy(plain, name)) for name in [*CONSTRAINTS, *SHORT, *MINIMAL]}


@pytest.fixture(
    scope="module",
    params=[
        "synchronous",
        pytest.param("asynchronous", marks=pytest.mark.matrix),
        pytest.param("levels at once", marks=pytest.mark.matrix),  # a P-EAGLE head; test_parallel_heads.py has less
    ],
)
def plugin(
    request: pytest.FixtureRequest, checkpoints: Path, expected: dict[str, list[tuple[Any, ...]]]
) -> Iterator[LLM]:
    target, head = (write_peagle if request.param == "levels at once" else write_models)(checkpoints)
    more = ASYNC if request.param == "asynchronous" else {"policy": "random"}
    with engine(target, head, **TREES, **more, **options()) as llm:
        yield llm


@pytest.mark.parametrize("name", [*CONSTRAINTS, *MINIMAL])
def test_greedy_text_is_that_of_plain_decoding(
    name: str, plugin: LLM, expected: dict[str, list[tuple[Any, ...]]]
) -> None:
    acceptance = Acceptance(plugin)
    answers = greedy(plugin, name)
    assert endings(answers) == expected[name]
    if name == "words":
        assert acceptance.length > 1.4
    if name in MINIMAL:
        assert {len(answer.outputs[0].token_ids) for answer in answers} == {MINIMAL[name][1] + 1}


def test_requests_that_miss_a_step_of_a_scheduler_ahead(
    models: tuple[Path, Path], expected: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the trees that they have from the step before, the scheduler makes no masks: verified, such a tree would
    write on after the end that its grammar sets."""
    dropped, drop = Counter[str](), DraftStore.forget_unmasked

    def counted(store: DraftStore, *given: Any) -> None:
        before = set(store._found)
        drop(store, *given)
        dropped.update(before - set(store._found))

    monkeypatch.setattr(DraftStore, "forget_unmasked", counted)
    short = sorted(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))[:4]  # a step reads more prompts than trees
    asked = [(name, i) for name in ("schema 0", "schema 1", *SHORT) for i in short]  # the last ones miss steps
    few = options() | {"max_num_batched_tokens": 64, "max_num_seqs": 32}
    with engine(*models, **TREES, **ASYNC, **few) as llm:
        # All requests are in the first step, however long their grammars take.
        core(llm).structured_output_manager._use_async_grammar_compilation = False
        settings = [constrained((CONSTRAINTS | SHORT)[name]) for name, _ in asked]
        found = endings(ask(llm, [PROMPTS[i] for _, i in asked], settings))
    assert found == [expected[name][i] for name, i in asked] and len(dropped) > 4


@pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
@pytest.mark.parametrize("drafted", [0, 2])
def test_placeholders_in_place_of_drafts(tmp_path: Path, backend: str, drafted: int) -> None:
    """A scheduler ahead schedules -1 for drafts that nobody has made: they are no nodes of the request's older tree."""
    target = bigram_target(tmp_path, layers=1, heads=4, vocab=288)  # a mask's last bit is a token's
    chosen = {"structured_outputs_config": {"backend": backend}, "max_num_seqs": 4}
    manager = StructuredOutputManager(EngineArgs(model=str(target), **DEFAULTS | chosen).create_engine_config())
    wanted = StructuredOutputsParams(regex="[ -~]{9,}")
    wanted._backend = backend
    asked = Request("one", [5], SamplingParams(structured_outputs=wanted), None)
    asked.sampling_params.update_from_generation_config({}, 1)  # the token that ends a text
    manager._use_async_grammar_compilation = False
    manager.grammar_init(asked)
    drafts, requests = with_parents(DraftTokenIds(["one"], [[]]), {"one": [0, 0, 1]}), {"one": asked}
    note_parents(lambda *_: None, SimpleNamespace(requests=requests), drafts)
    (a,), (line_break,) = (manager.tokenizer.encode(text, add_special_tokens=False) for text in "a\n")
    tokens = [a, line_break][:drafted] + [-1] * (3 - drafted)
    masks = mask_nodes(StructuredOutputManager.grammar_bitmask, manager, requests, ["one"], {"one": tokens})
    assert len(masks) == 4 and masks[0, -1] < 0  # the last token is allowed
    assert (masks == masks[0]).all()
    masks = mask_nodes(StructuredOutputManager.grammar_bitmask, manager, requests, ["one"], {"one": []})
    assert len(masks) == 1, "the grammar is where it was"


def test_sampled_responses_are_valid(plugin: LLM) -> None:
    """All constraints in one batch, with a free request after every one, and penalties on some."""
    turns = [*CONSTRAINTS] * 8
    settings = []
    for i, name in enumerate(turns):
        penalty = {"frequency_penalty": 0.3} if i % 3 == 0 else {}
        settings += [constrained(CONSTRAINTS[name], temperature=0.9, **penalty), {"temperature": 1.0}]
    acceptance = Acceptance(plugin)
    answers = ask(plugin, [PROMPTS[i % len(PROMPTS)] for i in range(len(settings))], settings)
    assert acceptance.length > 1.1
    responses = [answer.outputs[0].text for answer in answers[::2]]
    for name, text, answer in zip(turns, responses, answers[::2], strict=True):
        assert answer.outputs[0].finish_reason == "stop", (name, text)
        valid(name, text)
    assert len(set(responses)) > len(turns) // 3


def test_trees_under_a_grammar_need_fewer_rounds_than_chains(
    plugin: LLM, expected: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains are what a server with a reasoning parser drafts: there a grammar begins somewhere on the path."""

    def verify(self: TreeVerifier, batch: RoundBatch, *more: Any) -> Any:
        rounds[-1] += batch.b
        return original(self, batch, *more)

    original, rounds = TreeVerifier.verify, []
    monkeypatch.setattr(TreeVerifier, "verify", verify)
    monkeypatch.setattr(ShapeChooser, "choose", lambda self, *asked: self.caps)
    for with_reasoner in (False, True):
        monkeypatch.setattr(runner(plugin), "_has_reasoner", with_reasoner)
        rounds.append(0)
        for name in ("words", *(f"schema {i}" for i in range(len(SCHEMAS)))):
            assert endings(greedy(plugin, name)) == expected[name]
    assert rounds[0] < rounds[1], rounds


def test_whole_trees_under_a_grammar_are_noticed(
    plugin: LLM, expected: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the scheduler follows a grammar along the drafts as if they were a chain. In trees of all caps."""
    monkeypatch.setattr(ShapeChooser, "choose", lambda self, *asked: self.caps)
    monkeypatch.setattr(TreeModelRunner, "take_draft_token_ids", GPUModelRunner.take_draft_token_ids)
    assert endings(greedy(plugin, "words")) != expected["words"]
