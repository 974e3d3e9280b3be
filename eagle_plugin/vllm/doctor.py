"""Says who would serve a start command of vLLM: ``eagle-plugin doctor`` asks it in the environment of that command.

vLLM's launcher decides everything when it makes its configuration of the flags, and the plugin does so there. So the
same configuration is made here, and read.
"""

from __future__ import annotations

import os
from typing import Any

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.vllm_classes import METHODS
from eagle_plugin.kernels import loader
from eagle_plugin.runtime.head_costs import Launch, costs_of
from eagle_plugin.runtime.startup import engine_serves, plugin_serves
from eagle_plugin.runtime.verdict import (
    LogLines,
    Verdict,
    answer,
    changes_for,
    not_loaded,
    parsing,
    without_prefix,
)
from eagle_plugin.vllm import mtp_support, version
from eagle_plugin.vllm.cache_dtypes import FLOAT8

LOGGER = "vllm.eagle_plugin"


def judge(arguments: list[str], lines: LogLines) -> Verdict:
    """The verdict on a command's arguments: `serve` and what follows, or the flags of the API server's module.

    lines: what the plugin logs in this process.

    Raises CommandRefused, and whatever vLLM raises for flags that it does not take.
    """
    config = configuration_of(arguments)
    speculative = config.speculative_config
    verdict = Verdict("vLLM", version.installed(), "plain", "", warnings=[])
    if speculative is None:
        verdict.sentence = "no drafts: vLLM decodes token by token, because the command has no --speculative-config"
        verdict.changes = [
            """add --speculative-config '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5}'"""
        ]
        return verdict
    from eagle_plugin.vllm.block_support import method_of
    from eagle_plugin.vllm.plugin_config import plugin_config

    verdict.warnings = [without_prefix(line) for line in lines.lines]
    ours = plugin_config(speculative)
    if ours is None:
        _explain(verdict, config, arguments)
    else:
        device = config.device_config.device_type
        verdict.serves = "plugin"
        verdict.sentence = plugin_serves(method_of(speculative), ours.caps, loader.backend(device))
        verdict.open = ["the layers of the target and the KV cache are looked at when they are made"]
        if ours.subject is not None:
            verdict.open.append("a round of the real models is tested against plain decoding before the first request")
    if speculative.method in METHODS:
        verdict.memory = costs_of(_launch(config, ours.caps if ours else None))
    return verdict


def configuration_of(arguments: list[str]) -> Any:
    """The ``VllmConfig`` that vLLM's launcher makes of these arguments; the plugin is asked on the way, as ever."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    with parsing("vllm"):
        parser = FlexibleArgumentParser(prog="vllm")
        flags = command.subparser_init(parser.add_subparsers(dest="subparser"))  # those of the module too
        given = (parser if arguments[:1] == ["serve"] else flags).parse_args(arguments)
        command.validate(given)
    if getattr(given, "model_tag", None) is not None:
        given.model = given.model_tag
    headless = bool(given.headless)
    engine = AsyncEngineArgs.from_cli_args(given)
    return engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=headless)


def _explain(verdict: Verdict, config: Any, arguments: list[str]) -> None:
    """Fill in why vLLM's own speculation would serve this ``VllmConfig``."""
    verdict.serves, method = "engine", config.speculative_config.method
    if method not in mtp_support.METHODS:
        served = ", ".join(mtp_support.METHODS)
        verdict.sentence = f"method {method}: vLLM's own speculation serves it, the plugin serves {served}"
        return
    if missing := not_loaded("vllm"):
        verdict.sentence, change = missing
        verdict.changes = [change]
        return
    own = engine_serves(method, "vLLM", [])
    logged = [line for line in verdict.warnings if line.startswith(without_prefix(own))]
    verdict.warnings = [line for line in verdict.warnings if line not in logged]
    if not logged:  # `startup.may_serve` has not let the plugin in, and logged why
        verdict.sentence = verdict.warnings.pop() if verdict.warnings else own + "the plugin does not say why"
        return
    from eagle_plugin.vllm.unsupported import unsupported_reasons

    text = logged[-1].removeprefix(without_prefix(own))
    found = unsupported_reasons(config)
    verdict.reasons = found if "; ".join(found) == text else [text]  # else the head, or the self-test
    verdict.sentence = own + text
    verdict.changes = changes_for(verdict.reasons, arguments)


def _launch(config: Any, caps: Shape | None) -> Launch:
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    blocks = cache.num_gpu_blocks_override
    dtype = str(model.dtype).removeprefix("torch.")
    return Launch(
        target=model.model,
        head=config.speculative_config.model,
        device=config.device_config.device_type,
        dtype=dtype,
        cache_bytes=1 if cache.cache_dtype in FLOAT8 else 4 if dtype == "float32" else 2,
        tokens=blocks * cache.block_size * parallel.data_parallel_size if blocks and cache.block_size else None,
        requests=config.scheduler_config.max_num_seqs,
        caps=caps,
        vocabulary=model.get_vocab_size(),
    )


def main() -> None:
    """For the process that ``eagle-plugin doctor`` starts."""
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # vLLM sets the level of all its loggers again; ours is one of them
    answer("vllm", version.installed(), LOGGER, judge)


if __name__ == "__main__":
    main()
