"""Drives vLLM's own engine core with our runner inside this process, on models whose forwards compute nothing.

The engine core is the real one, with async scheduling as on a GPU: it schedules, prepares each batch, calls the runner
and reads its results. Prefills run the real tiny models. In decode steps the forwards of both models and their logits
are fixed tensors; in captured ones every function that a GPU would replay as a graph runs outside the clock, as one
launch, and so does the target's forward, which is vLLM's own graph. What is left of a step is the work of the host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

# Before vLLM is imported: one process, quiet, on the threads of OMP_NUM_THREADS; captured steps by emulated graphs.
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ["EAGLE_GRAPHS"] = "emulate"

import tiny_models
import torch
from torch.utils._pytree import tree_leaves
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

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
    count_replays,
    fixed_shapes,
    mark,
    read_as_on_a_gpu,
)
from benchmarks.launches import ENGINE, GRAPH, CountLaunches, Probe
from benchmarks.vllm_process import runner_of
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.graphs import Buckets
from eagle_plugin.vllm import runner as runner_module
from eagle_plugin.vllm import shapes as shapes_module
from eagle_plugin.vllm.runner import TreeModelRunner
from eagle_plugin.vllm.shapes import RoundShapes

# The phases of a step, in their order; the last one is the engine's bookkeeping with what is left of ours.
PREPARE, WALK, EXTEND, DRAFT, REST = PHASES = ("preparation", "walk", "extend", "draft", "rest")


def boot(folder: Path, shape: Shape, most: int = MAX_BATCH, policy: MakePolicy | None = None) -> LLM:
    """An engine of this process with our runner, on tiny random models that are written into `folder`.

    Steps are scheduled ahead. most: requests at a time. policy: of the shapes; None for fixed ones.
    """
    torch.set_num_threads(1)
    os.environ["EAGLE_POLICY"] = "auto" if policy else "fixed"
    if policy:  # no costs are measured
        vars(shapes_module)["start_policy"] = lambda caps, key, measure, logger, shapes=None, **_: policy(caps, shapes)
    target = tiny_models.tiny_llama(folder / "target", vocab=VOCABULARY, head_dim=32)
    head = tiny_models.tiny_eagle3_head(folder / "head", target)
    trees = {"depth": shape.steps, "topk": shape.topk, "async_scheduling": True}
    llm = LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,  # the emulator sees nothing of compiled models
        max_model_len=CONTEXT,
        max_num_seqs=most,
        max_num_batched_tokens=2 * most * shape.width,
        block_size=32,
        num_gpu_blocks_override=most * CONTEXT // 32 + 1,
        enable_prefix_caching=False,  # every run prefills its prompts
        speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": shape.width - 1},
        additional_config={"eagle_plugin": trees},
    )
    runner = runner_of(llm)
    if not isinstance(runner, TreeModelRunner) or runner._step is None:
        raise UserError(
            f"vLLM decodes with {type(runner).__name__}, wanted TreeModelRunner with captured steps: use the "
            "environment of `make env-vllm`, and unset EAGLE_PLUGIN"
        )
    read_as_on_a_gpu(runner_module)
    return llm


class Rounds:
    """Decode steps of one engine, measured by a probe."""

    def __init__(self, llm: LLM, probe: Probe, choosers: Choosers = fixed_shapes) -> None:
        self._llm, self._probe, self._choosers = llm, probe, choosers
        self._core: Any = llm.llm_engine.engine_core.engine_core
        self._counting = self._captured = self._decodes = False
        self._measured: list[Round] = []
        self._runner = runner = runner_of(llm)
        self._step = runner._step
        policy = runner._shapes.chooser.policy
        self._shapes: Sequence[Shape] = policy.shapes if policy else ()
        self._captured_sizes = self._step._buckets
        drafter = runner.drafter
        self._fix(runner, "_model_forward", self._count_target)
        self._fix(runner.model, "compute_logits", lambda: probe.count("compute_logits", ENGINE))
        for name in ("_combined", "_forward", "_logits"):
            self._fix(drafter, name)
        # A phase begins with the call, the next one after it.
        mark(probe, runner, "_sample", WALK, REST)
        mark(probe, runner, "propose_draft_token_ids", EXTEND, REST)
        mark(probe, drafter, "draft_tree", DRAFT, REST)
        mark(probe, self._step, "draft_tree", DRAFT, REST)
        count_replays(probe, self._step.functions)
        runner.execute_model = self._first_half(runner.execute_model)
        runner.sample_tokens = self._second_half(runner.sample_tokens)

    def run(self, runs: Iterable[Run]) -> Iterator[tuple[Run, list[Round]]]:
        """Decode every run from its prefill on, one after the other; yields its measured steps."""
        for number, run in enumerate(runs):
            self._counting, self._captured, self._measured = run.counting, run.captured, []
            self._step._buckets = self._captured_sizes if run.captured else Buckets([])
            self._runner._shapes = RoundShapes(self._choosers(run, self._runner._caps, self._shapes))
            if self._probe.in_round:
                self._probe.end_round()
            names = [f"{number}-{i}" for i in range(run.scenario.batch)]
            sampling = SamplingParams(
                temperature=run.scenario.temperature,
                top_p=0.9 if run.scenario.temperature else 1.0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                detokenize=False,
            )
            for i, name in enumerate(names):
                prompt = TokensPrompt(prompt_token_ids=run.scenario.prompt(i))
                self._llm.llm_engine.add_request(name, prompt, sampling)
            while len(self._measured) < WARM_ROUNDS + run.rounds:
                self._serve()
            self._llm.llm_engine.abort_request(names)
            while self._core.scheduler.has_requests() or self._core.batch_queue:
                self._serve()
            yield run, self._measured[WARM_ROUNDS : WARM_ROUNDS + run.rounds]

    def _serve(self) -> None:
        """One step of the engine core, as its own process would do it."""
        _, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)

    def _first_half(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """The runner's step up to the target's logits: of a decode step it is timed, or its launches are counted."""

        def prepare(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            probe, drafts = self._probe, scheduled.scheduled_spec_decode_tokens
            rows = scheduled.num_scheduled_tokens
            self._decodes = bool(rows) and all(n == 1 + len(drafts.get(name, ())) for name, n in rows.items())
            if not self._decodes:
                with probe.left_out():
                    return execute(scheduled, *args, **kwargs)
            if not probe.in_round:  # the first step of a run: the engine's work before it is not measured
                probe.begin_round(SCHEDULER)
            probe.enter(PREPARE)
            with self._launches():
                return execute(scheduled, *args, **kwargs)

        return prepare

    def _second_half(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def finish(*args: Any, **kwargs: Any) -> Any:
            probe = self._probe
            if not self._decodes:
                with probe.left_out():
                    return sample(*args, **kwargs)
            with self._launches():
                result = sample(*args, **kwargs)
            probe.end_round()
            drafted = self._runner._shapes._drafted
            self._measured.append(Round.of(probe, drafted and drafted.shape))
            probe.begin_round(SCHEDULER)
            return result

        return finish

    def _launches(self) -> AbstractContextManager[Any]:
        return CountLaunches(self._probe) if self._counting else nullcontext()

    def _count_target(self) -> None:
        if self._captured:
            self._probe.count(f"{GRAPH} target", ENGINE)

    def _fix(self, owner: Any, name: str, count: Callable[[], None] = lambda: None) -> None:
        """Let owner.name compute once per shapes of its arguments in decode steps, and then return the same again."""
        call, outputs = getattr(owner, name), dict[tuple[Any, ...], Any]()

        def fixed(*args: Any, **kwargs: Any) -> Any:
            if not self._probe.in_round:
                return call(*args, **kwargs)
            count()
            with self._probe.left_out():
                key = tuple(x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
                if key not in outputs:
                    outputs[key] = call(*args, **kwargs)
                return outputs[key]

        setattr(owner, name, fixed)
