"""What a worker takes of its steps for the feature store: the states of the reference, whatever the scheduler does."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bigram_models
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engines import engine, rounds, runner
from vllm_greedy import GreedyModels, make_prompts, write_models

from eagle_plugin.heads import new_command
from eagle_plugin.learning.data.answer_faults import answer_fault
from eagle_plugin.learning.data.store.contents import read_contents
from eagle_plugin.learning.data.store.features import Taps, load_target
from eagle_plugin.learning.data.store.objects import open_folder
from eagle_plugin.learning.data.store.shards import Document, Layout, decode
from eagle_plugin.runtime.graph_emulator import recording_launches
from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.vllm.features import StepFeatures

TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16}
# The last ones begin as the first ones do: a prefix cache has their blocks.
PROMPTS = [*make_prompts(6, longest=120), *([*prompt, 7] for prompt in make_prompts(6, longest=120)[:3])]
TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GreedyModels:
    return write_models(tmp_path_factory.mktemp("features"), PROMPTS)


def ask(llm: LLM, prompts: Sequence[list[int]], **more: Any) -> list[list[int]]:
    settings = [
        SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            ignore_eos=True,
            extra_args={"eagle_plugin": json.dumps({"features": {"id": f"doc-{i}", "source": "test"}} | more)},
        )
        for i in range(len(prompts))
    ]
    answers = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], settings, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def stored(store: Path, answers: Sequence[list[int]], shards: int = 1) -> dict[str, Document]:
    """The documents of a store, when those of all answers that are kept are there, and so many shards."""
    wanted = {f"doc-{i}" for i, answer in enumerate(answers) if answer_fault(answer) is None}
    folder, end = open_folder(store), time.monotonic() + 60
    assert len(wanted) > len(answers) // 2
    while True:
        contents = read_contents(folder)
        if {entry.id for entry in contents.entries} == wanted and len(contents.shards) >= shards:
            break
        assert time.monotonic() < end, (wanted, contents)
        time.sleep(0.1)
    found = {}
    for entry in contents.entries:
        size = Layout.of(contents.manifest, entry.length).size
        found[entry.id] = decode(entry, folder.read(entry.shard, entry.offset, entry.offset + size), contents.manifest)
    return found


def check_states(
    documents: dict[str, Document], sequences: dict[str, list[int]], target: Path, layers: Sequence[int] = (2, 3, 4)
) -> None:
    """Compare with what transformers compute for the same tokens."""
    assert documents and documents.keys() <= sequences.keys()
    with Taps(load_target(target, torch.float32), layers) as taps:
        for name, document in documents.items():
            assert document.ids.tolist() == sequences[name]
            assert document.mask.sum() == TOKENS and bool(document.mask[-TOKENS:].all())
            aux, last = taps.run(document.ids[None], [len(document.ids)])
            assert aux is not None and document.aux is not None
            for found, wanted in ((document.aux, aux[0]), (document.last, last[0])):
                torch.testing.assert_close(found[:-1].float(), wanted[:-1], atol=2**-6, rtol=2**-7)


CASES = [
    pytest.param({"max_num_batched_tokens": 40}, "random", True, False, id="chunks and cut trees"),
    pytest.param({}, "fixed", False, False, id="one step at a time", marks=pytest.mark.matrix),
    pytest.param({}, "fixed", True, True, id="captured rounds", marks=pytest.mark.matrix),
    # Room for some 10 blocks of 32 tokens: requests are preempted, and begin again.
    pytest.param({"num_gpu_blocks_override": 12}, "random", True, False, id="preemption", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("options", "policy", "asynchronous", "graphs"), CASES)
def test_the_states_are_those_of_the_reference(
    options: dict[str, Any],
    policy: str,
    asynchronous: bool,
    graphs: bool,
    models: GreedyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE_FEATURES", str(tmp_path / "store"))
    if graphs:
        monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    with (
        recording_launches() if graphs else nullcontext(),
        engine(
            models.target,
            models.heads["reduced"],
            policy=policy,
            **TREES,
            plugin={"async_scheduling": asynchronous},
            enable_prefix_caching=True,
            **options,
        ) as llm,
    ):
        answers = ask(llm, PROMPTS)
        sequences = {f"doc-{i}": [*PROMPTS[i], *answer] for i, answer in enumerate(answers)}
        check_states(stored(tmp_path / "store", answers), sequences, models.target)
        found = rounds(llm)
        assert found.tokens > 1.3 * found.count > 0, "no paths of several tokens were tried"
        if graphs:
            assert runner(llm)._step.functions.replays > 10
        if policy == "random" and asynchronous and "max_num_batched_tokens" in options:
            step = StepFeatures.step

            def shifted(self: Any, state: Any, ids: Any, positions: Any, parts: Any, last: Any) -> None:
                step(self, state, ids, positions, [part.roll(1, 0) for part in parts], last)

            with monkeypatch.context() as patch:
                patch.setattr(StepFeatures, "step", shifted)
                before = [path.unlink() for path in (tmp_path / "store").glob("shard-*")]
                assert before and ask(llm, PROMPTS) == answers
            with pytest.raises(AssertionError, match="Tensor-likes are not close"):
                check_states(stored(tmp_path / "store", answers), sequences, models.target)


def test_a_server_without_a_head_is_refused(
    models: GreedyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_FEATURES", str(tmp_path))
    with pytest.raises(StartRefused, match="cannot store hidden states: it has no draft head of the plugin"):
        LLM(str(models.target), max_model_len=64)
    monkeypatch.setenv("EAGLE_FEATURES", "store")
    with pytest.raises(StartRefused, match="EAGLE_FEATURES is store, wanted a URL or a folder from the root on"):
        LLM(str(models.target), max_model_len=64)


@pytest.mark.matrix
def test_an_untrained_head_will_do(models: GreedyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eagle-plugin new-head`, in plain rounds: the states that any head gets, of the layers that it names."""
    head = tmp_path / "head"
    command = [str(models.target), str(head), "--kind", "eagle3", "--dtype", "float32", "--aux-layers", "2,3,4"]
    assert new_command.main(command) == 0
    monkeypatch.setenv("EAGLE_FEATURES", str(tmp_path / "store"))
    with engine(models.target, head, **TREES) as llm:
        answers = ask(llm, PROMPTS, draft=False)
        sequences = {f"doc-{i}": [*PROMPTS[i], *answer] for i, answer in enumerate(answers)}
        check_states(stored(tmp_path / "store", answers), sequences, models.target)
        assert rounds(llm).count == 0


@pytest.mark.matrix
def test_two_ranks_store_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = bigram_models.bigram_target(tmp_path / "target", heads=10, noise=0.02)  # heads that two ranks divide
    head = bigram_models.bigram_eagle3_head(tmp_path / "head", target, wrong=0.3)
    spoken = bigram_models.spoken(target)
    prompts = [spoken[i : i + 4 + 2 * i] for i in range(6)]
    monkeypatch.setenv("EAGLE_FEATURES", str(tmp_path / "store"))
    with engine(target, head, **TREES, tensor_parallel_size=2) as llm:
        answers = ask(llm, prompts)
        sequences = {f"doc-{i}": [*prompts[i], *answer] for i, answer in enumerate(answers)}
        layers = read_contents(open_folder(tmp_path / "store")).manifest.aux_layers
        check_states(stored(tmp_path / "store", answers), sequences, target, layers)
