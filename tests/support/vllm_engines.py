"""vLLM engines inside the test's own process: plain, with draft trees, or with vLLM's own chain of drafts."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tiny_checkpoints import read_config
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.executor import TreeExecutor
from eagle_plugin.vllm.shapes import RoundShapes
from eagle_plugin.vllm.tree_steps import TreeSteps

# Small enough to start in seconds; blocks of 32 tokens, so that texts of tests reach over several.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",  # in bfloat16 near-ties part the texts
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "enable_prefix_caching": False,
    "disable_log_stats": False,  # get_metrics() wants them
}
V2 = "VLLM_USE_V2_MODEL_RUNNER"
_open = 0  # engines; they share the process groups of torch


@contextmanager
def engine(
    target: Path,
    head: Path | None = None,
    *,
    depth: int = 2,
    topk: int = 4,
    nodes: int = 8,
    chain: bool = False,
    policy: str = "fixed",
    plugin: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[LLM]:
    """An engine, shut down at the end; without a head it decodes plainly. The target as head: its own MTP layer.

    Trees have at most `nodes` nodes, root included; `chain` leaves a chain of nodes - 1 tokens to vLLM itself. `policy`
    says how their shapes are chosen (``EAGLE_POLICY``). `plugin` holds more options of the plugin, `options` go to vLLM
    in front of DEFAULTS. Engines may be open inside each other, but vLLM's metrics are those of the one made last.
    """
    global _open
    served = head is not None and not chain
    if head is not None:
        speculative = {"num_speculative_tokens": nodes - 1} | _drafter(target, head)
        options = {"speculative_config": speculative} | options
    if served:
        trees = {"depth": depth, "topk": topk} | (plugin or {})
        options = {"additional_config": {"eagle_plugin": trees}} | options
    llm = None
    _open += 1
    asked = os.environ.get(V2)
    try:
        if asked is not None and not served:
            os.environ[V2] = "0"  # the kernels of V2 are interpreted here, and what they say is not the question
        # The plugin looks at the variables while an engine is made; they stay unset for what a test starts later.
        os.environ.update(EAGLE_PLUGIN="0" if chain else "1", EAGLE_POLICY=policy)
        with nullcontext() if "attention_backend" in options else latent_kernels(target):
            llm = LLM(str(target), **DEFAULTS | options)
        assert _is_served(llm) == served
        if asked is not None:
            os.environ[V2] = asked
        yield llm
    finally:
        for name in ("EAGLE_PLUGIN", "EAGLE_POLICY"):
            os.environ.pop(name, None)
        _open -= 1
        with patch.object(gc, "collect"):  # which vLLM asks for several times, over all modules
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            if not _open:
                cleanup_dist_env_and_memory()
        gc.collect()
        if not _open:
            gc.freeze()  # which vLLM has undone: tests/conftest.py


def _drafter(target: Path, head: Path) -> dict[str, str]:
    """Who drafts, as of ``--speculative-config``."""
    if head == target:
        return {"method": "mtp"}
    names = "".join(read_config(head)["architectures"])
    method = next((name.lower() for name in ("Eagle3", "DFlash", "DSpark") if name in names), "eagle")
    return {"method": method, "model": str(head)}


@contextmanager
def latent_kernels(target: Path) -> Iterator[None]:
    """A target with latent attention (MLA) as on a CPU without AMX: with it vLLM takes kernels that have no float32."""
    if "kv_lora_rank" not in read_config(target):
        yield
        return
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False):
        yield


def _is_served(llm: LLM) -> bool:
    executor = core(llm).model_executor
    if isinstance(executor, MultiprocExecutor):  # several ranks, whose runners are in processes of their own
        return isinstance(executor, TreeExecutor)
    return isinstance(runner(llm), TreeSteps)


def runner(llm: LLM) -> Any:
    """The model runner of an engine; one with ``TreeSteps`` where the plugin serves."""
    return core(llm).model_executor.driver_worker.worker.model_runner


def requests_of(llm: LLM) -> set[str]:
    """The names of the requests that the runner of an engine has."""
    made = runner(llm)
    return set(made.requests if hasattr(made, "requests") else made.req_states.req_id_to_index)


@contextmanager
def random_shapes(llm: LLM) -> Iterator[Counter[Shape]]:
    """Let an engine with trees change their shape at random, as with EAGLE_POLICY=random; counts those asked for."""
    counts, chooser = Counter[Shape](), ShapeChooser(runner(llm)._caps, None, shapes_within(runner(llm)._caps))
    choose = chooser.choose

    def counted(*arguments: Any) -> Shape:
        shape = choose(*arguments)
        counts[shape] += 1
        return shape

    chooser.choose = counted  # type: ignore[method-assign]
    with chosen_by(llm, chooser):
        yield counts


@contextmanager
def drafted_shapes(llm: LLM) -> Iterator[Counter[Shape]]:
    """Count the steps of an engine with trees by the shape that they draft."""
    counts, store = Counter[Shape](), runner(llm)._store
    put = store.put

    def counted(names: Sequence[str], drafts: Drafts, borrowed: bool = False) -> None:
        counts[drafts.shape] += 1
        put(names, drafts, borrowed)

    store.put = counted
    try:
        yield counts
    finally:
        del store.put


@contextmanager
def fixed_shapes(llm: LLM) -> Iterator[None]:
    """Let an engine with trees draft the caps in every round, as with EAGLE_POLICY=fixed."""
    with chosen_by(llm, ShapeChooser(runner(llm)._caps, None)):
        yield


class AlwaysPlain(ShapeChooser):
    """Never drafts."""

    def choose(self, *arguments: Any) -> Shape:
        return PLAIN


@contextmanager
def chosen_by(llm: LLM, chooser: ShapeChooser) -> Iterator[None]:
    """Let an engine with trees ask this chooser for their shapes."""
    served = runner(llm)
    before, served._shapes = served._shapes, RoundShapes(chooser)
    try:
        yield
    finally:
        served._shapes = before


def core(llm: LLM) -> Any:
    """vLLM's ``EngineCore``: scheduler and executor."""
    return llm.llm_engine.engine_core.engine_core


def free_blocks(llm: LLM) -> int:
    """Blocks of the KV cache that no request holds."""
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def settle(llm: LLM) -> None:
    """Let the worker hear of the last requests that finished: vLLM tells it with the next step."""
    while core(llm).scheduler.has_requests() or core(llm).batch_queue:
        llm.llm_engine.step()


def run(llm: LLM, prompts: Sequence[str | list[int]], **sampling: Any) -> list[RequestOutput]:
    """The answers to prompts, as texts or token ids; greedy unless `sampling`, a request's, says otherwise."""
    given = [TokensPrompt(prompt_token_ids=p) if isinstance(p, list) else p for p in prompts]
    settings = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "detokenize": False} | sampling
    return llm.generate(given, SamplingParams(**settings), use_tqdm=False)


def generate(llm: LLM, prompts: Sequence[str | list[int]], **sampling: Any) -> list[list[int]]:
    """The first answer to each prompt, as token ids; see :func:`run`."""
    return [list(answer.outputs[0].token_ids) for answer in run(llm, prompts, **sampling)]


def counters(llm: LLM) -> dict[str, float]:
    """vLLM's counters by name, since the engine was made; those with a value for each position are left out."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


class Rounds(NamedTuple):
    """Verifications of drafts, and the tokens that they yielded, bonus tokens included."""

    count: int
    tokens: int


def rounds(llm: LLM, before: Rounds = Rounds(0, 0)) -> Rounds:  # noqa: B008
    """The verifications of an engine so far, less those `before`."""
    found = counters(llm)
    count = int(found["vllm:spec_decode_num_drafts"])
    tokens = count + int(found["vllm:spec_decode_num_accepted_tokens"])
    return Rounds(count - before.count, tokens - before.tokens)


def accept_length(llm: LLM) -> float:
    """Tokens per verification, the bonus token included, over all requests since the engine was made."""
    count, tokens = rounds(llm)
    return tokens / count
