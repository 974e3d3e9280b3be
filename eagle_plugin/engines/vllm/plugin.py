"""Entry point ``vllm.general_plugins``: our worker serves the methods eagle and eagle3.

vLLM calls :func:`register` in every process that it starts, sometimes twice. What serves is decided once, when the
launcher has the whole configuration; the other processes get the decision with the configuration.
"""

from __future__ import annotations

import logging
from typing import Any

from eagle_plugin.engines.startup import may_serve, switched_off
from eagle_plugin.engines.vllm import version

logger = logging.getLogger("vllm.eagle_plugin")  # below vLLM's logger, so that its handlers print our lines

_MARK = "_eagle_plugin_original"


def register() -> None:
    """Hook into vLLM's configuration, unless ``EAGLE_PLUGIN=0`` or the vLLM version is not a tested one."""
    if not may_serve("vLLM", version.installed(), version.TESTED, logger):
        return
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams

    _wrap(type(current_platform), "check_and_update_config", _after_platform)
    _wrap(SamplingParams, "_validate_spec_decode", _validate)


def _wrap(owner: type, name: str, hook: Any) -> None:
    """Replace a method of `owner` by hook(original, *arguments), once."""
    found = owner.__dict__[name]
    original = found.__func__ if isinstance(found, classmethod) else found
    if hasattr(original, _MARK):
        return

    def hooked(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    setattr(hooked, _MARK, original)
    setattr(owner, name, classmethod(hooked) if isinstance(found, classmethod) else hooked)


def _after_platform(original: Any, platform: type, vllm_config: Any) -> None:
    """AROUND the platform's changes to the configuration, which come last: choose who serves."""
    original(platform, vllm_config)
    if switched_off():  # set after a first engine of this process
        return
    from eagle_plugin.engines.vllm.support import choose_worker

    choose_worker(vllm_config)


def _validate(original: Any, params: Any, speculative_config: Any) -> None:
    """AROUND the check of a request's sampling parameters: ours serves min_p and logit_bias with drafts too."""
    from eagle_plugin.engines.vllm.served import is_served

    if not is_served(speculative_config):
        original(params, speculative_config)
