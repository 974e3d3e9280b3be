"""What later requests find in the prefix cache was read by the head too, whoever decoded plainly before them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_waits import Findings, Functions, Operations
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engines import AlwaysPlain, chosen_by, counters, engine, generate, runner
from vllm_greedy import VOCAB, write_blurred_head, write_target

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.deferred_extend import DeferredRows

BLOCK = 32
DICE = random.Random(11)
PROMPTS = [DICE.choices(range(3, VOCAB), k=70 + 9 * i) for i in range(5)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("prefixes")
    target = write_target(folder)
    head = write_blurred_head(folder, target)
    options = {"block_size": BLOCK, "num_gpu_blocks_override": 128, "enable_prefix_caching": True}
    with engine(target, head, depth=3, topk=4, nodes=16, **options) as made:
        yield made


def plainly(llm: LLM) -> Any:
    return chosen_by(llm, AlwaysPlain(runner(llm)._caps, None))


def forget_all(llm: LLM) -> None:
    """Empty the prefix cache, and the head's blocks, which still hold what it once read."""
    assert llm.reset_prefix_cache()
    served = runner(llm)
    for layer in served.drafter._draft_attn_layer_names:
        served.compilation_config.static_forward_context[layer].kv_cache.zero_()
    served._deferred.forget(list(served._deferred._kept))


class Recorder(ShapeChooser):
    """Drafts the caps, and keeps what the head made of its candidates."""

    def __init__(self, caps: Shape) -> None:
        super().__init__(caps, None)
        self.scores: list[Tensor] = []

    def launched(self, shape: Shape, b: int, keys: int, drafts: Drafts, *more: Any) -> ServedRound:
        assert drafts.scores is not None
        self.scores.append(drafts.scores.exp().clone())
        return super().launched(shape, b, keys, drafts, *more)


def drafted(llm: LLM, prompts: list[list[int]]) -> Tensor:
    """The probabilities of all candidates while each prompt in turn is answered with trees."""
    recorder = Recorder(runner(llm)._caps)
    with chosen_by(llm, recorder):
        for prompt in prompts:
            generate(llm, [prompt], max_tokens=12)
    return torch.cat([scores.flatten() for scores in recorder.scores])


def test_a_conversation_that_goes_on_is_drafted_as_a_new_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and answers of plain requests are the prefix of drafted ones."""
    served = runner(llm)

    def go_on() -> tuple[list[list[int]], Tensor]:
        """Prompts that go on after plain answers, and what the head drafts for them."""
        forget_all(llm)
        with plainly(llm):
            answers = generate(llm, PROMPTS, max_tokens=50)
        longer = [prompt + answer + [5, 9, 11] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        hits = counters(llm)["vllm:prefix_cache_hits"]
        found = drafted(llm, longer)
        assert counters(llm)["vllm:prefix_cache_hits"] - hits >= len(PROMPTS) * 2 * BLOCK
        return longer, found

    prompts, after_hits = go_on()
    forget_all(llm)
    fresh = drafted(llm, prompts)
    torch.testing.assert_close(after_hits, fresh, atol=1e-4, rtol=0)
    with monkeypatch.context() as patched:
        patched.setattr(served.drafter, "read_deferred", lambda rows: None)
        prompts_again, unread = go_on()
    assert prompts_again == prompts
    assert unread.shape != fresh.shape or (unread - fresh).abs().max() > 5e-3


def test_a_prompt_that_two_requests_share_in_one_step(llm: LLM) -> None:
    """The second finds the blocks in the step that fills them, and goes on when the first has ended."""
    prompt = PROMPTS[-1]
    fresh = after_forgetting(llm, [prompt])
    forget_all(llm)
    with plainly(llm):
        for name, tokens in (("a", 2), ("b", 8)):
            settings = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), settings)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    torch.testing.assert_close(drafted(llm, [prompt]), fresh, atol=1e-4, rtol=0)


def test_a_prompt_that_comes_again_hits_as_many_blocks_as_without_speculation(llm: LLM) -> None:
    """Stock vLLM drops the last one of a hit where a head drafts."""
    forget_all(llm)
    first = generate(llm, PROMPTS, max_tokens=20)
    hits = counters(llm)["vllm:prefix_cache_hits"]
    assert generate(llm, PROMPTS, max_tokens=20) == first
    found = counters(llm)["vllm:prefix_cache_hits"] - hits
    assert found == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS)


def test_a_block_before_another_token(llm: LLM) -> None:
    """The head's last key of a block depends on the token after it: newer releases hash it with the block, so that the
    drafts are those of a new prompt; in older ones the block is found, and a draft may be another."""
    shared, next_tokens = PROMPTS[-1][: 3 * BLOCK], ([5, 7, 9], [8, 6, 4])
    first, second = (shared + more for more in next_tokens)
    forget_all(llm)
    fresh = generate(llm, [second], max_tokens=20)
    fresh_drafts = after_forgetting(llm, [second])
    forget_all(llm)
    drafted(llm, [first])
    hits = counters(llm)["vllm:prefix_cache_hits"]
    found = drafted(llm, [second])
    hit = counters(llm)["vllm:prefix_cache_hits"] - hits
    hashed = not getattr(runner(llm).speculative_config, "disable_lookahead_block_hashes", True)
    assert hit == (2 if hashed else 3) * BLOCK
    if hashed:
        torch.testing.assert_close(found, fresh_drafts, atol=1e-4, rtol=0)
    else:
        assert found.shape != fresh_drafts.shape or (found - fresh_drafts).abs().max() > 1e-4
    assert generate(llm, [second], max_tokens=20) == fresh


def after_forgetting(llm: LLM, prompts: list[list[int]]) -> Tensor:
    forget_all(llm)
    return drafted(llm, prompts)


def test_blocks_of_a_request_that_still_runs(llm: LLM) -> None:
    """Who enters with a prefix of it makes the head read it; who has another prefix does not."""
    served = runner(llm)
    settings = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)

    def rows() -> dict[str, list[int]]:
        return {
            name.partition("-")[0]: [len(run.places) for run in kept.runs]
            for name, kept in served._deferred._kept.items()
            if isinstance(name, str)
        }

    prompt = PROMPTS[-1]
    forget_all(llm)
    with plainly(llm):
        llm.llm_engine.add_request("a", TokensPrompt(prompt_token_ids=prompt), settings)
        llm.llm_engine.step()
        assert rows() == {"a": [len(prompt)]}
        llm.llm_engine.add_request("b", TokensPrompt(prompt_token_ids=PROMPTS[0]), settings)
        llm.llm_engine.step()
        assert rows() == {"a": [len(prompt) + 1], "b": [len(PROMPTS[0])]}
        llm.llm_engine.add_request("c", TokensPrompt(prompt_token_ids=prompt[:-3] + [4, 4]), settings)
        llm.llm_engine.step()
        left = len(prompt) - 1 - 3 * BLOCK  # it finds three blocks
        assert rows() == {"a": [1], "b": [len(PROMPTS[0]) + 1], "c": [left]}
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    generate(llm, [[5, 6]], max_tokens=1)  # a step in which the worker hears of the end
    assert not {"a", "b", "c"} & rows().keys()


def test_blocks_of_a_request_that_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads them when another request finds them, and never those that are used anew before."""
    served, read = runner(llm), []
    read_deferred = served.drafter.read_deferred

    def recorded(rows: DeferredRows) -> None:
        read.append(len(rows.tokens))
        read_deferred(rows)

    monkeypatch.setattr(served.drafter, "read_deferred", recorded)
    prompt = PROMPTS[-1]
    forget_all(llm)
    with plainly(llm):
        generate(llm, [prompt], max_tokens=2)
        generate(llm, [[5, 6]], max_tokens=1)  # a step in which the worker hears of the end
        blocks = [key for key in served._deferred._kept if not isinstance(key, str)]
        assert len(blocks) == len(prompt) // BLOCK and not read
        generate(llm, [prompt[: BLOCK + 2]], max_tokens=1)
        assert read == [BLOCK]
        left = [served._deferred._kept[block] for block in blocks[1:]]
        llm.reset_prefix_cache()
        for first in range(3, 3 + 2 * llm.llm_engine.vllm_config.cache_config.num_gpu_blocks // 4):
            generate(llm, [[first] * (4 * BLOCK)], max_tokens=1)
        assert read == [BLOCK] and not any(kept is entry for kept in served._deferred._kept.values() for entry in left)


def test_who_has_which_blocks_is_known_on_the_host(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end and prompts that come again beside plain rounds ask no tensor: a GPU still runs the step."""
    deferred, findings, asked = runner(llm)._deferred, Findings(), list[int]()

    def watched(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with Functions(findings), Operations(findings):
                found = method(*arguments)
            asked.append(len(found or ()))
            return found

        return call

    forget_all(llm)
    for name in ("wanted_by_blocks", "add"):
        monkeypatch.setattr(deferred, name, watched(getattr(deferred, name)))
    with plainly(llm):
        for _ in range(2):
            for i, prompt in enumerate(PROMPTS):
                settings = SamplingParams(temperature=0.0, max_tokens=3 + 4 * i, ignore_eos=True, detokenize=False)
                llm.llm_engine.add_request(f"{i}", TokensPrompt(prompt_token_ids=prompt), settings)
                llm.llm_engine.step()
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
    assert max(asked) >= 2 and findings == {}
