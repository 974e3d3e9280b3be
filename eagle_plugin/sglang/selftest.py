"""The self-test of a server before its first request: the kernels before our worker is made, the real round after.

On a GPU it always runs, once per device, versions and model (`eagle_plugin.selftest.record`); on a CPU with
``EAGLE_SELFTEST=1`` or ``EAGLE_PLUGIN=force``, and where graphs are emulated. All ranks of tensor parallelism decide
alike: each one's findings are gathered before anything is concluded from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from eagle_plugin.heads.files import levels_of
from eagle_plugin.runtime.capturing import emulated
from eagle_plugin.selftest import decision, record, suite
from eagle_plugin.selftest.decision import decide, is_asked_for, told
from eagle_plugin.selftest.shapes import DTYPES, ModelShape, as_text
from eagle_plugin.sglang import version
from eagle_plugin.sglang.dummy_batches import Parts
from eagle_plugin.sglang.fallback import fall_back
from eagle_plugin.sglang.pools import chunk_of, pools_of, windows_of
from eagle_plugin.sglang.ranks import gather_objects, rank_logger
from eagle_plugin.sglang.round_test import RoundTest
from eagle_plugin.sglang.synthetic import synthetic_rates

logger = logging.getLogger("eagle_plugin")


def is_wanted(device: str) -> bool:
    """Whether a server on this kind of device tests itself."""
    return emulated() or is_asked_for(device)


def failed_kernels(runner: Any) -> list[str]:
    """Why our worker must not serve this loaded target (an SGLang ``ModelRunner``) on this device; empty if it may.

    Runs the kernels on the target's shapes, unless a record says what they gave. The record of a real round that failed
    at an earlier start counts too.
    """
    if not is_wanted(runner.device):
        return []
    shape = model_shape(runner)
    if isinstance(shape, str):
        return [shape]
    kernels = record.key_of("kernels", _device(runner), as_text(shape), _engine())
    failed = _decide(kernels, lambda: suite.differences(_device(runner), shape))
    if failed:
        return failed
    earlier = record.read(round_key(runner, shape))
    return told(agree(earlier.reasons if earlier else []))


def check_rounds(worker: Any) -> bool:
    """Test the rounds of a `TreeWorker` whose graphs have been captured; whether it may serve.

    If anything differs the engine's own worker takes its place. Either way the worker's ``announce`` says who serves.
    """
    runner = worker.target_worker.model_runner
    reasons: list[str] = []
    if is_wanted(worker.device):
        shape = model_shape(runner)
        assert isinstance(shape, ModelShape)  # else the engine's own worker was made
        reasons = _decide(round_key(runner, shape), lambda: test_rounds(parts_of(worker)))
    if reasons:
        fall_back(worker)
    worker.announce(reasons)
    return not reasons


def test_rounds(parts: Parts) -> list[str]:
    """One sentence per thing that differs in the real round, and between ranks."""
    test = RoundTest(parts)
    reasons = test.run()
    everyones = gather_objects(test.fingerprints)
    other = [rank for rank, found in enumerate(everyones) if found != everyones[0]]
    if other:
        first = next(i for i, (x, y) in enumerate(zip(everyones[0], everyones[other[0]], strict=True)) if x != y)
        reasons.append(f"ranks {', '.join(map(str, other))} accepted other tokens than rank 0 in test round {first}")
    return reasons


def model_shape(runner: Any) -> ModelShape | str:
    """What the kernels see of a loaded target with its server's trees; a reason where they do not serve it."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
    layer, config = layers[0], runner.model_config
    dtype = str(runner.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return f"--dtype {dtype}: only {', '.join(DTYPES)} are served"
    draft = runner.spec_aux_config.draft_model_config
    drafted = getattr(draft.hf_config, "draft_vocab_size", None) or draft.vocab_size
    steps, topk, width = _tree_flags()
    return ModelShape(
        heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        dtype=dtype,
        vocabulary=config.vocab_size,
        draft_vocabulary=drafted,
        window=max([-1, *windows_of(runner.model)]),
        chunk=chunk_of(runner),
        logit_cap=float(layer.logit_cap),
        steps=steps,
        topk=topk,
        width=width,
    )


def round_key(runner: Any, shape: ModelShape) -> dict[str, Any]:
    """What the result of the real round depends on, as far as it is known before our worker is made."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.runtime_context import get_parallel, get_schedule

    config, draft = runner.model_config, runner.spec_aux_config.draft_model_config
    graphs = emulated() if runner.device == "cpu" else not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    of_round = {
        "target": config.hf_config.architectures[0],
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "quantization": str(config.quantization),
        "head": draft.hf_config.architectures[0],
        "head_layers": draft.num_hidden_layers,
        "head_levels": levels_of(dict(vars(draft.hf_config))).value,
        "ranks": get_parallel().tp_size,
        "page_size": get_schedule().page_size,
        "requests": get_schedule().max_running_requests,
        "graphs": graphs,
        **({} if synthetic_rates(1) is None else {"acceptance": "synthetic"}),
    }
    return record.key_of("round", _device(runner), as_text(shape) | of_round, _engine())


def parts_of(worker: Any) -> Parts:
    """What the rounds of a `TreeWorker` run on."""
    runner, drafter = worker.target_worker.model_runner, worker.draft_worker
    caches = []
    for engines_pool in (runner.token_to_kv_pool, drafter.draft_runner.token_to_kv_pool):
        for pool in pools_of(engines_pool):
            caches += [(cache, pool) for cache in (*pool.buffers.k_buffer, *pool.buffers.v_buffer)]
    return Parts(
        decode_round=worker._round,
        reader=worker._reader,
        verifier=worker._verifier,
        drafter=drafter,
        shape=worker.shape,
        vocabulary=runner.model_config.vocab_size,
        draft_vocabulary=drafter._draft_vocabulary(),
        req_to_token=worker.req_to_token_pool.req_to_token,
        rng_keys=worker._keys.table,
        allocator=worker.token_to_kv_pool_allocator,
        caches=caches,
    )


def _decide(key: Mapping[str, Any], test: Callable[[], list[str]]) -> list[str]:
    """`decide` among the ranks of this server."""
    return decide(key, test, gather_objects, rank_logger(logger))


def agree(reasons: list[str]) -> list[str]:
    """The reasons of all ranks, each once; one that not all ranks have is told with its ranks."""
    return decision.agree(reasons, gather_objects)


def _tree_flags() -> tuple[int, int, int]:
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return spec.speculative_num_steps, spec.speculative_eagle_topk, spec.speculative_num_draft_tokens


def _device(runner: Any) -> torch.device:
    return torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device)


def _engine() -> str:
    return f"sglang {version.installed()}"
