"""Tests a server before its first request: the kernels before our worker is made, the real round after.

On a GPU it always runs, once per device, versions and model (`eagle_plugin.selftest.record`); on a CPU with
``EAGLE_SELFTEST=1`` or ``EAGLE_PLUGIN=force``, and where graphs are emulated. All ranks of tensor parallelism decide
alike: each one's findings are gathered before anything is concluded from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle_plugin.common.device_memory import is_out_of_memory
from eagle_plugin.common.errors import UserError, first_line
from eagle_plugin.heads.files import levels_of
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.runtime.capturing import emulated
from eagle_plugin.runtime.lookups import wants_lookups
from eagle_plugin.runtime.ranks import OtherRankFailed
from eagle_plugin.selftest import decision, subject
from eagle_plugin.selftest.decision import decide, is_asked_for, keep_failure, next_start
from eagle_plugin.selftest.failure import LeftOut
from eagle_plugin.selftest.shapes import CACHES, DTYPES, ModelShape, as_text
from eagle_plugin.selftest.subject import Subject, round_key
from eagle_plugin.sglang import version
from eagle_plugin.sglang.block_flags import caps_of
from eagle_plugin.sglang.dummy_batches import Parts, parts_of
from eagle_plugin.sglang.fallback import fall_back
from eagle_plugin.sglang.kernel_settings import kernel_settings
from eagle_plugin.sglang.pools import chunk_of, windows_of
from eagle_plugin.sglang.ranks import gather_objects, rank_logger
from eagle_plugin.sglang.round_test import RoundTest
from eagle_plugin.sglang.synthetic import synthetic_rates

logger = logging.getLogger("eagle_plugin")


def is_wanted(device: str) -> bool:
    """Whether a server on this kind of device tests itself."""
    return emulated() or is_asked_for(device)


def failed_kernels(runner: Any) -> list[str]:
    """Why our worker must not serve this loaded target (an SGLang ``ModelRunner``) on this device; empty if it may."""
    if not is_wanted(runner.device):
        return []
    dtype = _dtype(runner)
    if dtype not in DTYPES:
        return [f"--dtype {dtype}: only {', '.join(DTYPES)} are served"]
    return subject.failed_kernels(subject_of(runner), _device(runner), gather_objects, rank_logger(logger))


def prepared(prepare: Callable[[], None]) -> list[str]:
    """Run the first rounds and captures of a worker; why they failed, in any rank. Raises UserError."""
    failed = []
    try:
        prepare()
    except OtherRankFailed:
        pass  # this rank has none of its own; that of the other one is gathered below
    except UserError:  # what the user can correct
        raise
    except Exception as error:
        logger.exception("eagle-plugin: a first round of the plugin's worker failed")
        reason = f"a first round failed: {first_line(error)}"
        failed = [LeftOut(reason) if is_out_of_memory(error) else reason]
    return [reason for found in gather_objects(failed) for reason in found]


def check_rounds(worker: Any, failed: Sequence[str] = ()) -> bool:
    """Test the rounds of a `TreeWorker` whose graphs have been captured; whether it may serve.

    If anything differs, or its rounds have failed already, the engine's own worker takes its place. Either way the
    worker's ``announce`` says who serves. failed: of all ranks (`prepared`); it is kept, so that the next start leaves
    the server to the engine from the first. Raises StartRefused where the engine's worker cannot take over.
    """
    runner, log = worker.target_worker.model_runner, rank_logger(logger)
    reasons = list(failed)
    key = round_key(subject_of(runner), _device(runner)) if is_wanted(worker.device) else None
    if key is not None and reasons:
        keep_failure(key, reasons, log)
    elif key is not None:
        captured = worker._round.widest()
        reasons = decide(key, lambda: test_rounds(parts_of(worker)), gather_objects, log, captured)
    if reasons:
        fall_back(worker, reasons, next_start(key, gather_objects, "SGLang"))
    worker.announce(reasons)
    return not reasons


def test_rounds(parts: Parts) -> list[str]:
    """One sentence per thing that differs in the real round, and between ranks."""
    from sglang.srt.runtime_context import get_parallel

    test = RoundTest(parts)
    reasons = test.run()
    everyones = gather_objects(test.fingerprints)
    alike = get_parallel().attn_tp_size  # ranks that serve the same requests, one after the other
    firsts = [everyones[rank - rank % alike] for rank in range(len(everyones))]
    other = [rank for rank, found in enumerate(everyones) if found != firsts[rank]]
    if other:
        rank = other[0]
        number = next(i for i, (x, y) in enumerate(zip(firsts[rank], everyones[rank], strict=True)) if x != y)
        reasons.append(
            f"ranks {', '.join(map(str, other))} accepted other tokens than rank {rank - rank % alike} in test round "
            f"{number}"
        )
    return reasons


def subject_of(runner: Any) -> Subject:
    """What the self-test of a server depends on, as far as it is known before our worker is made.

    runner: the loaded target's, with one of `DTYPES`; its server's flags have the trees' caps.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

    layer = next(layer for layer in runner.model.modules() if isinstance(layer, RadixAttention))
    config, draft = runner.model_config, runner.spec_aux_config.draft_model_config
    trees, ranks = caps_of(runner), get_parallel().tp_size
    shape = ModelShape(
        heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        dtype=_dtype(runner),
        kv_cache=found if (found := str(runner.kv_cache_dtype).removeprefix("torch.")) in CACHES else "auto",
        vocabulary=config.vocab_size,
        draft_vocabulary=getattr(draft.hf_config, "draft_vocab_size", None) or draft.vocab_size,
        window=max([-1, *windows_of(runner.model)]),
        chunk=chunk_of(runner),
        logit_cap=float(layer.logit_cap),
        **trees._asdict(),
    )
    graphs: Any = emulated() if runner.device == "cpu" else []
    if runner.device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        graphs = list(get_exec().graph.cuda_graph_config.decode.bs or [])  # of these sizes
    real_round = {
        "target": config.hf_config.architectures[0],
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "quantization": str(config.quantization),
        "head": draft.hf_config.architectures[0],
        "head_layers": draft.num_hidden_layers,
        "head_levels": levels_of(dict(vars(draft.hf_config))).value,
        "ranks": ranks,
        "page_size": get_schedule().page_size,
        "requests": get_schedule().max_running_requests,
        "graphs": graphs,
        "policy": policy_mode(),  # which shapes are captured
        "lookup": wants_lookups(),
        **kernel_settings(runner.server_args),
        **({} if synthetic_rates(1) is None else {"acceptance": "synthetic"}),
    }
    engine = f"sglang {version.installed()}"
    return Subject(runner.device, ranks, [config.head_dim, draft.head_dim], as_text(shape), real_round, engine)


def agree(reasons: list[str]) -> list[str]:
    """The reasons of all ranks, each once; one that not all ranks have is told with its ranks."""
    return decision.agree(reasons, gather_objects)


def _dtype(runner: Any) -> str:
    return str(runner.dtype).removeprefix("torch.")


def _device(runner: Any) -> torch.device:
    return torch.device("cuda", runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device)
