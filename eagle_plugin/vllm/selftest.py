"""Tests a server before its first request: the kernels before our worker is chosen, the real round after.

On a GPU it always runs, once per device, versions and model (`eagle_plugin.selftest.record`); on a CPU with
``EAGLE_SELFTEST=1`` or ``EAGLE_PLUGIN=force``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from eagle_plugin.common.device_memory import is_out_of_memory
from eagle_plugin.common.errors import UserError, first_line
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.runtime.lookups import wants_lookups
from eagle_plugin.selftest.decision import decide, is_asked_for, keep_failure, next_start, told
from eagle_plugin.selftest.launch import ask, tell_children, told_by_launcher
from eagle_plugin.selftest.shapes import ModelShape, as_text
from eagle_plugin.selftest.subject import Subject, round_key
from eagle_plugin.vllm import version
from eagle_plugin.vllm.cache_dtypes import dtype_name
from eagle_plugin.vllm.gpu import head_dims
from eagle_plugin.vllm.graph_modes import is_compiled, wants_graphs
from eagle_plugin.vllm.kernel_settings import kernel_settings
from eagle_plugin.vllm.synthetic import synthetic_rates


class SelfTestFailed(UserError):
    """The real round is not what it has to be on this machine; the sentence says how the server starts without it."""


def subject_of(vllm_config: Any, caps: Shape, levels: Levels, v2: bool = False) -> Subject | None:
    """What the self-test of this ``VllmConfig`` depends on; None where the server does not test itself.

    caps: of its trees; levels: how its head drafts them; v2: whether the worker's model runner is a V2 runner.
    """
    device = vllm_config.device_config.device_type
    if not is_asked_for(device):
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft, text = vllm_config.speculative_config.draft_model_config, model.hf_text_config
    window, ranks = model.get_sliding_window(), parallel.tensor_parallel_size
    shape = ModelShape(
        heads=model.get_num_attention_heads(parallel),
        kv_heads=1 if model.use_mla else model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        latent=text.kv_lora_rank if model.use_mla else 0,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache=dtype_name(vllm_config.cache_config.cache_dtype),
        vocabulary=model.get_vocab_size(),
        draft_vocabulary=getattr(draft.hf_config, "draft_vocab_size", None) or draft.get_vocab_size(),
        window=-1 if window is None else window - 1,
        chunk=getattr(text, "attention_chunk_size", None) or 0,
        logit_cap=float(getattr(text, "attn_logit_softcapping", None) or 0.0),
        **caps._asdict(),
    )
    real_round = {
        "target": model.architectures[0],
        "layers": text.num_hidden_layers,
        "hidden": model.get_hidden_size(),
        "quantization": str(model.quantization),
        "head": draft.architectures[0],
        "head_layers": getattr(draft.hf_text_config, "num_hidden_layers", None),
        "head_levels": levels.value,
        "ranks": ranks,
        "requests": vllm_config.scheduler_config.max_num_seqs,
        "compiled": is_compiled(vllm_config),
        "graphs": wants_graphs(vllm_config),
        "policy": policy_mode(),  # which shapes are captured
        "limits": vllm_config.speculative_config.num_speculative_tokens_per_batch_size,  # the same
        "lookup": wants_lookups(),
        **kernel_settings(vllm_config),
        **({"runner": "v2"} if v2 else {}),
        **({"expert_parallel": True} if parallel.enable_expert_parallel else {}),
        **({} if synthetic_rates(vllm_config.speculative_config) is None else {"acceptance": "synthetic"}),
    }
    engine = f"vllm {version.installed()}"
    devices = ranks * parallel.data_parallel_size_local
    return Subject(device, devices, head_dims(vllm_config), as_text(shape), real_round, engine)


def failed_kernels(subject: Subject | None, log: Callable[[int, str], None]) -> list[str]:
    """Why our worker must not serve on the devices of this machine; empty if it may, or nothing is tested.

    Asked in a process of its own, unless the process that started this one has; log: level and line.
    """
    if subject is None:
        return []
    answer = told_by_launcher(subject)
    if answer is None:
        answer = ask(subject)
        tell_children(subject, answer.reasons)
    for line in answer.log:
        log(logging.INFO, line)
    return answer.reasons


def check_rounds(runner: Any, subject: Subject | None, logger: logging.Logger) -> None:
    """Test the round of a `TreeModelRunner` whose caches no request uses yet; all ranks call this.

    Raises:
        SelfTestFailed: anything differs; if it is on record, the next start is left to vLLM's own worker.
    """
    if subject is None:
        return
    from eagle_plugin.vllm.ranks import gather_objects
    from eagle_plugin.vllm.round_test import RoundTest

    key = round_key(subject, runner.device)
    captured = [] if runner._step is None else runner._step.widest()
    reasons = decide(key, RoundTest(runner).run, gather_objects, logger, captured)
    if reasons:
        raise SelfTestFailed(f"{'; '.join(reasons)}; {next_start(key, gather_objects, 'vLLM')}")


@contextmanager
def first_rounds(runner: Any, subject: Subject | None, logger: logging.Logger) -> Iterator[None]:
    """Around the first rounds and captures of a worker: what fails in this rank is kept as a test that failed.

    What the user can correct passes through, and so does a lack of memory: with more of it the next start may succeed.

    Raises:
        SelfTestFailed: something else was raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if subject is None or is_out_of_memory(error):
            raise
        key, reason = round_key(subject, runner.device), f"a first round failed: {first_line(error)}"
        keep_failure(key, [reason], logger)
        # Without the other ranks: they may be anywhere.
        raise SelfTestFailed(f"{told([reason])[0]}; {next_start(key, lambda kept: [kept], 'vLLM')}") from error
