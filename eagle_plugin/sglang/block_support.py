"""Decides whether our worker serves a block drafter (DFlash, DSpark) with a target and flags; fewer than with heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.heads.block_config import ALGORITHM, ARCHITECTURES, MARKOV_ALGORITHM
from eagle_plugin.runtime.startup import SWITCH, StartRefused, forced

GPUS_ONLY = "SGLang's own worker serves block drafters on GPUs only"
_NOT_YET = "it is not served with block drafters yet"


def unsupported_block_flags(arguments: Any, server_args: Any) -> list[str]:
    """Why our worker does not serve block drafters with these resolved arguments; empty where it does.

    server_args: the same as the user gave them.
    """
    if arguments.speculative_algorithm not in (ALGORITHM, MARKOV_ALGORITHM):
        return []
    reasons = []
    if arguments.device != "cpu" and not forced():
        reasons.append(f"GPUs: none has run block drafters with the plugin's worker yet; {SWITCH}=force tries it")
    for name, served in (
        ("tp_size", (1,)),
        ("attn_dp_size", (None, 1)),
        ("speculative_draft_window_size", (None,)),
        ("enable_lora", (None, False)),
        ("lora_paths", (None, [], {})),
    ):
        if (value := getattr(arguments, name)) not in served:
            reasons.append(f"--{name.replace('_', '-')} {value}: {_NOT_YET}")
    steps, topk = server_args.speculative_num_steps, server_args.speculative_eagle_topk
    if steps is not None and topk is not None and (steps - 1) * topk > MAX_WIDTH:
        reasons.append(
            f"--speculative-num-steps {steps} with --speculative-eagle-topk {topk}: (steps - 1) * topk may be at most "
            f"{MAX_WIDTH}"
        )
    return reasons


def unsupported_block_drafters(arguments: Any, server_args: Any, target_runner: Any) -> list[str]:
    """The same, and why not with this loaded target (an SGLang ``ModelRunner``) and drafter."""
    if arguments.speculative_algorithm != ALGORITHM:
        return []
    from sglang.srt.configs.hybrid_arch import mambaish_config

    reasons, config = unsupported_block_flags(arguments, server_args), target_runner.model_config
    head = target_runner.spec_aux_config.draft_model_config.hf_config.architectures[0]
    if head not in ARCHITECTURES.values():
        reasons.append(f"block drafter {head}: only {' and '.join(ARCHITECTURES.values())} are served yet")
    if mambaish_config(config) is not None or config.is_multimodal:
        reasons.append(f"target {config.hf_config.architectures[0]}: {_NOT_YET}")
    return reasons


def refuse_on_a_cpu(algorithm: str, device: str, reasons: Sequence[str]) -> None:
    """Raise StartRefused for what ours does not serve with a block drafter on a CPU, where SGLang's does not run."""
    if algorithm == ALGORITHM and device == "cpu":
        raise StartRefused(UserError(f"{'; '.join(reasons)}; {GPUS_ONLY}"))


def worker_class(algorithm: str) -> type[Any]:
    """Ours for an algorithm; it imports the engine's worker."""
    if algorithm == ALGORITHM:
        from eagle_plugin.sglang.block_worker import BlockWorker

        return BlockWorker
    from eagle_plugin.sglang.worker import TreeWorker

    return TreeWorker
