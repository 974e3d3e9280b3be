"""One engine in a process of its own:

    python -m benchmarks.gpu.model_engine sglang --arguments JSON      # of `sglang.Engine` or `vllm.LLM`

It reads one JSON line per batch of requests from standard input, sends them at the same time, and writes one JSON line
with the answers to standard output; everything else that is printed goes to standard error. It ends with its input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

STARTED = 8  # tokens of each request before the window


class Event(NamedTuple):
    """What a request has after a round."""

    time: float
    request: int
    tokens: int
    is_last: bool


class Window(NamedTuple):
    """Between two rounds in which all requests decode."""

    seconds: float
    tokens: int  # of all requests

    @classmethod
    def of(cls, events: list[Event], requests: int) -> Window:
        """From the moment at which all have begun to the first end of one.

        It begins and ends with an event of the first request, so that the others have the same number of rounds in it.
        """
        counts = [0] * requests
        begin = end = (0.0, 0)
        for event in events:
            if event.is_last:
                break
            counts[event.request] = event.tokens
            if event.request == 0 and min(counts) >= STARTED:
                end = event.time, sum(counts)
                begin = begin if begin[1] else end
        return cls(end[0] - begin[0], end[1] - begin[1])


class Engine(Protocol):
    """An engine in this process or its children. parameters: of each request, `tokens` among them."""

    rounds: int  # verifications of drafts of all requests so far; 0 without drafts

    def forget(self) -> None:
        """Empty the prefix cache."""

    def answer(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> list[list[int]]:
        """The token ids of the answers to prompts that are sent at the same time."""

    def stream(self, prompts: list[list[int]], tokens: int) -> Iterator[Event]:
        """Send prompts at the same time, greedily and without an end; what they have after each round."""


class SGLang:
    """SGLang's engine."""

    def __init__(self, given: dict[str, Any]) -> None:
        import sglang

        self._engine, self.rounds = sglang.Engine(**given), 0

    def forget(self) -> None:
        self._engine.flush_cache()

    def answer(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> list[list[int]]:
        own = [{"max_new_tokens" if name == "tokens" else name: x for name, x in one.items()} for one in parameters]
        answers = self._engine.generate(input_ids=prompts, sampling_params=own)
        self.rounds += sum(one["meta_info"].get("spec_verify_ct") or 0 for one in answers)
        return [one["output_ids"] for one in answers]

    def stream(self, prompts: list[list[int]], tokens: int) -> Iterator[Event]:
        parameters = [{"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}] * len(prompts)
        for chunk in self._engine.generate(input_ids=prompts, sampling_params=parameters, stream=True):
            about, now = chunk["meta_info"], time.perf_counter()
            is_last = about["finish_reason"] is not None
            if is_last:
                self.rounds += about.get("spec_verify_ct") or 0
            yield Event(now, chunk.get("index", 0), about["completion_tokens"], is_last)


class VLLM:
    """vLLM's engine."""

    def __init__(self, given: dict[str, Any]) -> None:
        import vllm

        self._speculates, self._asked, self.rounds = "speculative_config" in given, 0, 0
        self._new_parameters, self._engine = vllm.SamplingParams, vllm.LLM(**given)

    def forget(self) -> None:
        self._engine.reset_prefix_cache()

    def answer(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> list[list[int]]:
        before = self._counts()
        own = [self._new_parameters(temperature=one["temperature"], max_tokens=one["tokens"]) for one in parameters]
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._engine.generate(requests, own, use_tqdm=False)
        text = [list(one.outputs[0].token_ids) for one in answers]
        self._count(before, sum(map(len, text)) - len(text))
        return text

    def stream(self, prompts: list[list[int]], tokens: int) -> Iterator[Event]:
        from vllm.sampling_params import RequestOutputKind

        before, engine, kind = self._counts(), self._engine.llm_engine, RequestOutputKind.DELTA
        parameters = self._new_parameters(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=kind
        )
        names = {f"{self._asked}-{i}": i for i in range(len(prompts))}
        self._asked += 1
        for name, i in names.items():
            engine.add_request(name, {"prompt_token_ids": prompts[i]}, parameters)
        counts = [0] * len(prompts)
        while engine.has_unfinished_requests():
            outputs, now = engine.step(), time.perf_counter()
            for output in sorted(outputs, key=lambda output: names[output.request_id]):
                i = names[output.request_id]
                counts[i] += len(output.outputs[0].token_ids)
                yield Event(now, i, counts[i], output.finished)
        self._count(before, sum(counts) - len(counts))

    def _counts(self) -> tuple[int, int]:
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        found = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return int(found.get(names[0], 0)), int(found.get(names[1], 0))

    def _count(self, before: tuple[int, int], decoded: int) -> None:
        """vLLM counts steps that verified drafts, not plain steps between them (eagle_plugin/bench/vllm_server.py)."""
        drafts, accepted = (after - first for after, first in zip(self._counts(), before, strict=True))
        self.rounds += max(drafts, decoded - accepted) if self._speculates else 0


ENGINES: dict[str, Any] = {"sglang": SGLang, "vllm": VLLM}


def answer(engine: Engine, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """text: token ids; tokens, rounds: of all requests; seconds: until the last."""
    began, before = time.perf_counter(), engine.rounds
    text = engine.answer(prompts, parameters)
    seconds = time.perf_counter() - began
    return {"text": text, "tokens": sum(map(len, text)), "rounds": engine.rounds - before, "seconds": seconds}


def measure(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """tokens_per_s of all requests, accept_length with the bonus token, and round_ms, of a round of all requests."""
    before = engine.rounds
    events = list(engine.stream(prompts, tokens))
    rounds, window = engine.rounds - before, Window.of(events, len(prompts))
    # The first token of an answer comes from its prompt.
    length = len(prompts) * (tokens - 1) / rounds if rounds else 1.0
    speed = window.tokens / window.seconds
    return {"tokens_per_s": speed, "accept_length": length, "round_ms": 1000 * len(prompts) * length / speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--arguments", type=json.loads, required=True)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    began = time.perf_counter()
    engine: Engine = ENGINES[options.engine](options.arguments)
    print(json.dumps({"start_seconds": time.perf_counter() - began}), file=replies, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        prompts, parameters = batch["prompts"], batch["parameters"]
        if batch["forget"]:
            engine.forget()
        timed = batch["timed"]
        found = measure(engine, prompts, parameters[0]["tokens"]) if timed else answer(engine, prompts, parameters)
        print(json.dumps(found), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # of any kind: the threads of an engine that has failed would keep this process
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # the parent ends the processes of the engine, which is quicker than a shutdown
