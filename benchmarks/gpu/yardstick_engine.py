"""One engine of steps `yardstick` and `vllm-yardstick`:

    python -m benchmarks.gpu.yardstick_engine sglang CASE --target DIR --head DIR --rates RATES

It is asked as `model_engine` is, and answers with what it took while all requests were decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.yardstick_cases import CASES, FULL, SMALLEST, Start, arguments
from eagle_plugin.runtime.synthetic import parse_rates

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
    """An engine in this process or its children."""

    rounds: int  # verifications of drafts of all requests so far; 0 without drafts

    def stream(self, prompts: list[list[int]], tokens: int) -> Iterator[Event]:
        """Send prompts at the same time; what they have after each round."""


class SGLang:
    """SGLang's engine."""

    def __init__(self, given: dict[str, Any], speculates: bool) -> None:
        import sglang

        self._engine, self.rounds = sglang.Engine(**given), 0

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

    def __init__(self, given: dict[str, Any], speculates: bool) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._speculates, self._asked, self._decoded = speculates, 0, 0
        self._parameters: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        self._parameters["output_kind"] = RequestOutputKind.DELTA
        self._new_parameters, self._engine = vllm.SamplingParams, vllm.LLM(**given)

    def stream(self, prompts: list[list[int]], tokens: int) -> Iterator[Event]:
        engine, parameters = self._engine.llm_engine, self._new_parameters(max_tokens=tokens, **self._parameters)
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

        self._decoded += sum(counts) - len(counts)

    @property
    def rounds(self) -> int:
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        found = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        drafts, accepted = (int(found.get(name, 0)) for name in names)
        # vLLM counts the steps that verified drafts, and not plain steps between them.
        return max(drafts, self._decoded - accepted) if self._speculates else 0


ENGINES: dict[str, Any] = {"sglang": SGLang, "vllm": VLLM}


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
    parser.add_argument("case")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fraction", type=float, default=0.9, help="of the GPU's memory that it may take")
    parser.add_argument("--rates", required=True, help="of accepted drafts, as EAGLE_SYNTHETIC_ACCEPTANCE takes them")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    size, on_gpu = SMALLEST if options.tiny else FULL, options.device.startswith("cuda")
    case, rates = CASES[options.engine][options.case], dict(parse_rates(options.rates))
    start = Start(options.target, options.head, on_gpu, options.fraction, size, rates)
    given = arguments(options.engine, case, start)
    began, speculates = time.perf_counter(), case.shape is not None
    engine: Engine = ENGINES[options.engine](given, speculates)
    print(json.dumps({"start_seconds": time.perf_counter() - began}), file=replies, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        print(json.dumps(measure(engine, batch["prompts"], batch["tokens"])), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # of any kind: the threads of an engine that has failed would keep this process
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # the parent ends the processes of the engine, which is quicker than a shutdown
