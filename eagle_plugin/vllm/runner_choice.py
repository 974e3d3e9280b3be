"""Chooses which of vLLM's two model runners ours is made of: V1, or V2 where the user asks for it."""

from __future__ import annotations

import os
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.heads.block_config import METHODS
from eagle_plugin.vllm import mtp_support

SETTING = "EAGLE_VLLM_RUNNER"
RUNNERS = ("v1", "v2")


class RunnerError(UserError):
    """The variable has a value that it cannot have."""


def asked_runner() -> str:
    """The runner that the environment asks for: by our variable, else by vLLM's; v1 where neither is set.

    Raises RunnerError.
    """
    from vllm import envs

    asked = os.environ.get(SETTING, "")
    if asked and asked not in RUNNERS:
        raise RunnerError(f"{SETTING} is {asked!r}, wanted {' or '.join(RUNNERS)}: set it to one of them, or unset it")
    return asked or ("v2" if envs.VLLM_USE_V2_MODEL_RUNNER else "v1")


def unserved_by_v2(vllm_config: Any) -> list[str]:
    """What of a vLLM ``VllmConfig`` our V2 runner does not serve and our V1 runner does; empty where it serves all."""
    model = vllm_config.model_config
    shares_experts = vllm_config.parallel_config.data_parallel_size > 1 and model.is_moe
    checks = (
        (shares_experts, f"--data-parallel-size with target {model.architectures[0]}"),
        ((method := vllm_config.speculative_config.method) in (*METHODS, mtp_support.METHOD), f"method {method}"),
    )
    return [what for found, what in checks if found]


def choose_runner(vllm_config: Any) -> tuple[bool, str]:
    """Whether our worker's runner of this ``VllmConfig`` is a V2 runner, and a line for the log, empty if there is
    nothing to say.

    The configuration is one that our worker serves, as vLLM has completed it for the runner that it would take itself.
    Raises RunnerError.
    """
    engines, asked = vllm_config.use_v2_model_runner, asked_runner()
    if asked == "v1":
        line = f"trees are served by vLLM's V1 model runner in place of V2 ({SETTING}=v2 keeps V2)" if engines else ""
        return False, line
    if not engines:
        return False, f"{SETTING} is v2, and vLLM takes its V1 model runner for this configuration: V1 serves the trees"
    if unserved := unserved_by_v2(vllm_config):
        return False, f"{', '.join(unserved)}: trees are served by vLLM's V1 model runner, not by V2 yet"
    return True, "trees are served by vLLM's V2 model runner"
