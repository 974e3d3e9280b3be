"""Logits after every node of a tree, against vLLM's sampler fed with the text along the path to the node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.vllm import logits as node_logits

VOCAB, STOP, OTHER_STOP = 24, 7, 11
TOKENS = [1, 4, STOP, 10, 13]  # few, so that paths repeat themselves, the output, and each other
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": -1.25},
    "frequency": {"frequency_penalty": 0.625},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {4: 2.5, 13: -1.0}},
    "allowed": {"allowed_token_ids": [1, 4, STOP, 10, 20]},
    "bad words": {"bad_words": ["two", "three"]},
    "minimal length": {"min_tokens": 5},
    "minimal length of two stops": {"min_tokens": 4, "stop_token_ids": [OTHER_STOP]},
    "minimal length where only the end is allowed": {
        "min_tokens": 6,
        "structured_outputs": "a grammar",
        "allowed_token_ids": [STOP],
    },
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.375,
        "repetition_penalty": 1.7,
        "logit_bias": {10: 1.0, STOP: 3.0},
        "bad_words": ["one", "two"],
        "min_tokens": 6,
        "allowed_token_ids": [1, 4, STOP, 10, 13, 20],
    },
}
BAD_WORDS = {"one": [20], "two": [4, 10], "three": [1, 4, 13]}


class Request:
    """The state of a request: parameters, prompt and text so far."""

    def __init__(self, name: str, prompt: list[int], output: list[int]) -> None:
        given = dict(SETTINGS[name])
        self.ancestors = [BAD_WORDS[word] for word in given.pop("bad_words", [])]
        structured = given.pop("structured_outputs", None)
        self.sampling_params = SamplingParams(**given)
        self.sampling_params.structured_outputs = structured  # of which only the presence is looked at
        self.sampling_params._all_stop_token_ids.add(STOP)
        self.prompt, self.output = prompt, output
        self.num_prompt_tokens = len(prompt)


def metadata_of(requests: list[Request], outputs: list[list[int]]) -> SamplingMetadata:
    """vLLM's metadata of a batch, with these outputs."""
    params = [request.sampling_params for request in requests]
    b, device = len(requests), torch.device("cpu")
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=b))
    processors = LogitsProcessors(processor(config, device, False) for processor in BUILTIN_LOGITS_PROCESSORS)
    added = [(i, params[i], requests[i].prompt, outputs[i]) for i in range(b)]
    for processor in processors.all:
        processor.update_state(BatchUpdate(b, removed=[], added=added, moved=[]))
    prompts = torch.full((b, max(len(request.prompt) for request in requests)), VOCAB)
    forbidden = torch.zeros(b, VOCAB, dtype=torch.bool)
    for i, request in enumerate(requests):
        prompts[i, : len(request.prompt)] = torch.tensor(request.prompt)
        if allowed := params[i].allowed_token_ids:
            forbidden[i] = True
            forbidden[i, allowed] = False
    penalties = {
        name: torch.tensor([getattr(p, name) for p in params])
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
    }
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=all(bool((values == neutral[name]).all()) for name, values in penalties.items()),
        prompt_token_ids=prompts,
        presence_penalties=penalties["presence_penalty"],
        frequency_penalties=penalties["frequency_penalty"],
        repetition_penalties=penalties["repetition_penalty"],
        output_token_ids=outputs,
        allowed_token_ids_mask=forbidden if bool(forbidden.any()) else None,
        bad_words_token_ids={i: request.ancestors for i, request in enumerate(requests) if request.ancestors},
        logitsprocs=processors,
    )


def random_tree(b: int, width: int, gen: torch.Generator) -> DraftTree:
    """Trees with about one node in eight being padding."""
    parents = torch.full((b, width), -1, dtype=torch.int32)
    depths = torch.zeros(b, width, dtype=torch.int32)
    for i in range(b):
        for node in range(1, width):
            parent = int(torch.randint(0, node, (), generator=gen))
            if torch.rand((), generator=gen) > 0.125 and (parent == 0 or parents[i, parent] >= 0):
                parents[i, node], depths[i, node] = parent, depths[i, parent] + 1
    tokens = torch.tensor(TOKENS)[torch.randint(0, len(TOKENS), (b, width), generator=gen)]
    ancestors = torch.tensor([[sum(1 << j for j in path(row, i)) for i in range(width)] for row in parents.tolist()])
    return DraftTree(tokens, parents, depths, ancestors)


def path(parents: list[int], node: int) -> list[int]:
    return [node, *(path(parents, parents[node]) if parents[node] >= 0 else [0] if node else [])]


def path_to(tree: DraftTree, i: int, node: int) -> list[int]:
    found: list[int] = []
    while node > 0:
        found.insert(0, int(tree.tokens[i, node]))
        node = int(tree.parents[i, node])
    return found


def compare(names: list[str], width: int, seed: int) -> Tensor:
    """Whether our logits differ from vLLM's at any token, for each row [b * W]; padding never does."""
    gen = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (), generator=gen))
        return [TOKENS[int(k)] for k in torch.randint(0, len(TOKENS), (length,), generator=gen)]

    requests = [Request(name, draw(1, 6), draw(0, 8)) for name in names]
    b = len(requests)
    tree = random_tree(b, width, gen)
    logits = torch.randn(b * width, VOCAB, generator=gen) * 3
    roots = torch.tensor([len(request.prompt) + len(request.output) - 1 for request in requests])
    ours = node_logits.transform_logits(
        metadata_of(requests, [request.output for request in requests]),
        tree,
        roots,
        node_logits.minimal_lengths(requests),
        node_logits.node_rows(b, width, None, b * width, torch.device("cpu")),
        logits.clone(),
    )
    wrong = torch.zeros(b * width, dtype=torch.bool)
    for row in range(b * width):
        i, node = divmod(row, width)
        if node and tree.parents[i, node] < 0:
            continue
        text = [*requests[i].output, *path_to(tree, i, node)]
        theirs = Sampler().apply_logits_processors(
            logits[row : row + 1].clone(), metadata_of([requests[i]], [text]), predict_bonus_token=False
        )
        wrong[row] = not torch.equal(ours[row], theirs[0])
    return wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_every_node_has_the_logits_of_its_path(name: str) -> None:
    for seed in range(12):
        assert not bool(compare([name] * 3, 1 + seed, seed).any()), seed


def test_requests_of_all_kinds_beside_each_other() -> None:
    for seed in range(12):
        assert not bool(compare([*SETTINGS, "all"], 8, 100 + seed).any()), seed


def test_rows_of_trees_that_were_cut_short() -> None:
    """vLLM has logits rows for the scheduled nodes only."""
    index = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 6, 6]])
    rows = node_logits.node_rows(3, 4, index, 7, torch.device("cpu"))
    assert rows.requests.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert rows.nodes.tolist() == [0, 0, 1, 2, 3, 0, 1]


def without_the_path(outputs: list[list[int]], tree: Any, rows: node_logits.NodeRows) -> list[list[int]]:
    return [outputs[i] for i in rows.requests.tolist()]


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition", "bad words", "all"])
def test_histories_without_the_path_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = node_logits._penalise

    def without(metadata: Any, tree: DraftTree, rows: Any, logits: Tensor) -> Tensor:
        return whole(metadata, tree._replace(ancestors=torch.ones_like(tree.ancestors)), rows, logits)

    monkeypatch.setattr(node_logits, "_histories", without_the_path)
    monkeypatch.setattr(node_logits, "_penalise", without)
    assert bool(compare([name] * 3, 12, 0).any())


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("minimal")])
def test_minimal_lengths_without_the_depth_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = node_logits._forbid_stops

    def flat(minimal: Any, tree: DraftTree, roots: Tensor, rows: Any, logits: Tensor) -> None:
        whole(minimal, tree._replace(depths=torch.zeros_like(tree.depths)), roots, rows, logits)

    monkeypatch.setattr(node_logits, "_forbid_stops", flat)
    found = [bool(compare([name] * 3, 12, seed).any()) for seed in range(6)]
    assert any(found) != (name == "minimal length where only the end is allowed")  # there the end is never held back
