"""Drives SGLang's own scheduler with our worker inside this process, on models whose forwards compute nothing.

The scheduler is the real one, with overlap on as on a GPU: it makes the batches, allocates slots, calls the worker and
reads its results. Requests come from a list in place of the socket. Prefills run the real tiny models. In eager decode
rounds the forward of each model returns fixed tensors; in captured ones every function that a GPU would replay as a
graph runs outside the clock, as one launch. What is left of a round is the work of the host.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

# Before SGLang is imported: its CPU engine, overlap scheduling there, and captured rounds by emulated graphs.
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "EAGLE_OVERLAP": "1", "EAGLE_GRAPHS": "emulate"}

import tiny_models
import torch
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from benchmarks.host_rounds import (
    CONTEXT,
    MAX_BATCH,
    MAX_TOKENS,
    SCHEDULER,
    VOCABULARY,
    WARM_ROUNDS,
    Choosers,
    MakePolicy,
    Round,
    Run,
    Scenario,
    count_replays,
    fixed_shapes,
    mark,
    read_as_on_a_gpu,
)
from benchmarks.launches import CountLaunches, Probe
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.graphs import Buckets
from eagle_plugin.sglang import decode_round, round_costs
from eagle_plugin.sglang.support import unsupported_reasons
from eagle_plugin.sglang.worker import TreeWorker

# The phases of a round, in their order.
BEGIN, DRAFT, PREPARE, TAIL, EXTEND, REST = PHASES = ("begin", "draft", "verify preparation", "tail", "extend", "rest")


def boot(folder: Path, shape: Shape, most: int = MAX_BATCH, policy: MakePolicy | None = None) -> Scheduler:
    """A scheduler of this process with our worker, on tiny random models that are written into `folder`.

    most: requests at a time. policy: of the shapes that are then captured; None for fixed ones.
    """
    os.environ["EAGLE_POLICY"] = "auto" if policy else "fixed"
    if policy:  # no costs are measured
        vars(round_costs)["start_policy"] = lambda caps, key, measure, logger, shapes, *rest: policy(caps, shapes)
    logging.disable(logging.WARNING)  # the engine has much to say about models that are not served here
    torch.set_num_threads(1)
    load_plugins()
    target = tiny_models.tiny_llama(folder / "target", vocab=VOCABULARY)
    head = tiny_models.tiny_eagle3_head(folder / "head", target)
    arguments = ServerArgs(
        model_path=str(target),
        device="cpu",
        dtype="float32",
        context_length=CONTEXT,
        max_total_tokens=most * CONTEXT,
        max_running_requests=most,
        mem_fraction_static=0.3,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(head),
        speculative_num_steps=shape.steps,
        speculative_eagle_topk=shape.topk,
        speculative_num_draft_tokens=shape.width,
        disable_radix_cache=True,  # every run prefills its prompts
        skip_server_warmup=True,
        log_level="error",
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
    worker = scheduler.draft_worker
    if not isinstance(worker, TreeWorker):
        reasons = unsupported_reasons(arguments, scheduler.tp_worker.model_runner)
        raise UserError(
            f"SGLang decodes with {type(worker).__name__} ({'; '.join(reasons)}), wanted TreeWorker: use the "
            "environment of `make env`, and unset EAGLE_PLUGIN"
        )
    read_as_on_a_gpu(decode_round)
    # Nobody reads the results.
    scheduler.ipc_channels.send_to_detokenizer.send_output = lambda *_: None
    return scheduler


class Rounds:
    """Decode rounds of one scheduler, measured by a probe."""

    def __init__(self, scheduler: Scheduler, probe: Probe, choosers: Choosers = fixed_shapes) -> None:
        self._scheduler, self._probe, self._choosers = scheduler, probe, choosers
        self._counting = False
        self._measured: list[Round] = []
        self._worker = worker = scheduler.draft_worker
        self._functions = worker._round
        self._captured_sizes = self._functions._buckets
        # The functions of a round: a phase begins with the call, the next one after it.
        mark(probe, self._functions, "draft", DRAFT, PREPARE)
        mark(probe, self._functions, "verify", PREPARE, TAIL)
        mark(probe, self._functions, "extend", EXTEND, REST)
        count_replays(probe, self._functions.functions)
        for runner in (worker.draft_worker.draft_runner, worker.target_worker.model_runner):
            runner.model.forward = self._fixed(runner.model.forward)
        worker.forward_batch_generation = self._round(worker.forward_batch_generation)

    def run(self, runs: Iterable[Run]) -> Iterator[tuple[Run, list[Round]]]:
        """Decode every run from its prefill on, one after the other; yields its measured rounds."""
        for run in runs:
            self._counting, self._measured = run.counting, []
            self._functions._buckets = self._captured_sizes if run.captured else Buckets([])
            self._worker.shapes = self._choosers(run, self._worker.shape, self._functions.shapes)
            if self._probe.in_round:
                self._probe.end_round()
            inputs = self._inputs(run)
            self._scheduler.request_receiver = SimpleNamespace(recv_requests=lambda inputs=inputs, **_: next(inputs))
            self._scheduler.gracefully_exit = False
            self._scheduler.run_event_loop()
            yield run, self._measured[WARM_ROUNDS : WARM_ROUNDS + run.rounds]

    def _inputs(self, run: Run) -> Iterator[list[Any]]:
        """What each step of the scheduler receives: the requests, then nothing until the rounds are measured."""
        yield [request(run.scenario, str(i)) for i in range(run.scenario.batch)]
        while len(self._measured) < WARM_ROUNDS + run.rounds:
            yield []
        yield [AbortReq(abort_all=True)]
        while not self._scheduler.is_fully_idle():
            yield []
        self._scheduler.gracefully_exit = True
        yield []

    def _round(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        """The worker's step: a decode round is timed, or its launches are counted."""

        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            probe = self._probe
            if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
                with probe.left_out():
                    return serve(batch, *args, **kwargs)
            if not probe.in_round:  # the first round of a run: the scheduler's work before it is not measured
                probe.begin_round(SCHEDULER)
            probe.enter(BEGIN)
            with CountLaunches(probe) if self._counting else nullcontext():
                result = serve(batch, *args, **kwargs)
            probe.end_round()
            self._measured.append(Round.of(probe, result.served.shape))
            probe.begin_round(SCHEDULER)
            return result

        return step

    def _fixed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that computes once per shape of a decode round, and then returns the same tensors again."""
        outputs: dict[tuple[Any, ...], Any] = {}

        def fixed(tokens: torch.Tensor, positions: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
            with self._probe.left_out():
                mode = batch.forward_mode
                if mode.is_extend() and not (mode.is_target_verify() or mode.is_draft_extend_v2()):
                    return forward(tokens, positions, batch, *args, **kwargs)
                key = (mode, batch.batch_size, len(tokens))
                if key not in outputs:
                    outputs[key] = forward(tokens, positions, batch, *args, **kwargs)
                return copy.copy(outputs[key])

        return fixed


def request(scenario: Scenario, name: str) -> TokenizedGenerateReqInput:
    """One request that goes on until it is aborted."""
    sampling = SamplingParams(
        temperature=scenario.temperature, top_p=0.9, max_new_tokens=MAX_TOKENS, ignore_eos=True, sampling_seed=None
    )
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", scenario.prompt(int(name))),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
