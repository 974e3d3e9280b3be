"""Says who would serve a start command of SGLang: ``eagle-plugin doctor`` asks it in the environment of that command.

SGLang's launcher checks flags and head, and its scheduler decides when it has loaded the target. What the scheduler
would see of the loaded target is here made of the configurations of both models (`PlannedRunner`); what only loaded
layers show is named as open.
"""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

from eagle_plugin.common.allow_list import ALLOW_LISTS
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.block_config import ALGORITHM
from eagle_plugin.kernels import loader
from eagle_plugin.runtime.head_costs import Launch, costs_of
from eagle_plugin.runtime.startup import engine_serves, plugin_serves
from eagle_plugin.runtime.verdict import (
    GROUPS,
    LogLines,
    Verdict,
    answer,
    changes_for,
    not_loaded,
    parsing,
    without_prefix,
)
from eagle_plugin.sglang import version
from eagle_plugin.sglang.draft_classes import drafts_by_own_layer

ALGORITHMS = ("EAGLE", "EAGLE3", ALGORITHM)
CPU_PACKAGE = "eagle_sglang_cpu"
CHANGES = "add --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD"


class Sampler:
    """SGLang's own, by its name: no flag of a server gives it another one."""


class PlannedRunner:
    """What a loaded target (an SGLang ``ModelRunner``) will have that flags and config.json decide.

    It has no layers.
    """

    def __init__(self, server_args: Any, arguments: Any) -> None:
        """arguments: the same, resolved."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.server_args, self.device = server_args, arguments.device
        self.model_config = config = ModelConfig.from_server_args(server_args)
        draft = ModelConfig.from_server_args(
            server_args, model_path=arguments.speculative_draft_model_path, is_draft_model=True
        )
        if arguments.speculative_draft_model_path is None and draft.num_nextn_predict_layers is None:
            draft = None  # as where the target is loaded
        self.spec_aux_config = SimpleNamespace(draft_model_config=draft)
        self.spec_algorithm = SpeculativeAlgorithm.from_string(arguments.speculative_algorithm)
        self.attention_chunk_size = config.attention_chunk_size
        self.dtype, self.sampler = config.dtype, Sampler()
        _, self.kv_cache_dtype = configure_kv_cache_dtype(
            server_args_kv_cache_dtype=arguments.kv_cache_dtype,
            model=None,
            model_dtype=config.dtype,
            is_draft_worker=False,
            is_dflash=self.spec_algorithm.is_dflash_family(),
            speculative_draft_attention_backend=None,
        )
        divided = arguments.tp_size if not arguments.enable_dp_lm_head else 1
        self.model = SimpleNamespace(modules=list, lm_head=SimpleNamespace(tp_size=divided))
        has_adapters = bool(arguments.enable_lora or arguments.lora_paths)
        backend = SimpleNamespace(name=arguments.lora_backend, is_moe_lora=False)
        self.lora_manager = SimpleNamespace(lora_backend=backend) if has_adapters else None


def judge(args: list[str], lines: LogLines) -> Verdict:
    """The verdict on the flags of a server; lines: what the plugin logs in this process.

    Raises CommandRefused, SystemExit with the plugin's sentence, and whatever SGLang raises for flags that it does not
    take.
    """
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    with parsing("sglang"):
        server_args = prepare_server_args(args)
    server_args.resolve_once()
    arguments = resolved_view(server_args)
    algorithm = arguments.speculative_algorithm
    verdict = Verdict("SGLang", version.installed(), "plain", "")
    if algorithm is None:
        verdict.sentence = (
            "no drafts: SGLang decodes token by token, because the command has no --speculative-algorithm"
        )
        verdict.changes = [CHANGES]
        return verdict
    factory = SpeculativeAlgorithm.from_string(algorithm).create_worker(server_args)
    verdict.warnings = [without_prefix(line) for line in lines.lines] + _without_cpu_package(arguments.device)
    verdict.serves = "engine"
    if algorithm not in ALGORITHMS:
        # The sentence below says the same.
        verdict.warnings = [line for line in verdict.warnings if not line.startswith(f"{algorithm} is served by")]
        verdict.sentence = f"{algorithm}: SGLang's own speculation serves it, the plugin serves {', '.join(ALGORITHMS)}"
        return verdict
    if isinstance(factory, type):  # the engine's class
        _explain(verdict, algorithm)
        verdict.memory = costs_of(_launch(arguments, PlannedRunner(server_args, arguments), None))
    else:
        _decide(verdict, server_args, arguments, args)
    return verdict


def _without_cpu_package(device: str) -> list[str]:
    """A sentence where the list of plugins drops what SGLang needs on this CPU (compat/sglang-cpu)."""
    allowed = ALLOW_LISTS["sglang"]
    installed = [found for found in metadata.entry_points(group=GROUPS["sglang"]) if found.name == CPU_PACKAGE]
    if device != "cpu" or not installed or not allowed.drops(CPU_PACKAGE):
        return []
    return [
        f"{allowed.variable} drops {CPU_PACKAGE} too, without which SGLang does not start on a CPU without AMX: "
        f"{allowed.repaired(CPU_PACKAGE)}"
    ]


def _explain(verdict: Verdict, algorithm: str) -> None:
    """Fill in why the plugin was not let in."""
    if missing := not_loaded("sglang"):
        verdict.sentence, change = missing
        verdict.changes = [change]
    elif verdict.warnings:  # of `startup.may_serve`
        verdict.sentence = verdict.warnings.pop()
    else:
        verdict.sentence = engine_serves(algorithm, "SGLang", ["its worker is another class than the plugin replaces"])


def _decide(verdict: Verdict, server_args: Any, arguments: Any, args: list[str]) -> None:
    """Ask what `support.worker_factory` asks of the loaded target."""
    from sglang.srt.runtime_context import publish

    from eagle_plugin.sglang import support
    from eagle_plugin.sglang.block_flags import asked_algorithm, caps_of
    from eagle_plugin.sglang.block_support import refuse_on_a_cpu
    from eagle_plugin.sglang.chain_advice import change_for_trees

    publish(server_args, role="scheduler")
    runner, algorithm = PlannedRunner(server_args, arguments), arguments.speculative_algorithm
    reasons = support.unsupported_settings(server_args, runner)
    if not reasons and runner.device == "cuda":
        reasons = support.unsupported_devices(runner, arguments)
    if reasons:
        refuse_on_a_cpu(algorithm, runner.device, reasons)
        verdict.reasons, verdict.changes = reasons, changes_for(reasons, args)
        verdict.sentence = engine_serves(algorithm, "SGLang", reasons)
        verdict.memory = costs_of(_launch(arguments, runner, None))
        return
    caps = caps_of(runner)
    verdict.serves = "plugin"
    asked = asked_algorithm(server_args, algorithm)
    verdict.sentence = plugin_serves(asked, caps, loader.backend(runner.device))
    if change := change_for_trees(server_args, caps):
        verdict.changes = [change]
    verdict.open = open_points(arguments, runner)
    verdict.memory = costs_of(_launch(arguments, runner, caps))


def open_points(arguments: Any, runner: PlannedRunner) -> list[str]:
    """What the start of a server with these resolved arguments will show, and may leave it to the engine for."""
    from eagle_plugin.sglang.selftest import is_wanted

    points = ["the layers of the target are looked at when they are loaded"]
    if arguments.quantization or runner.model_config.quantization:
        points.append("a quantised checkpoint may ask for another dtype of the KV cache")
    if runner.lora_manager is not None and runner.device != "cpu":
        points.append("whether an adapter changes experts is known when it is loaded; those are served on CPUs only")
    if is_wanted(runner.device):
        points.append("the self-test at the start: kernels, and a round of the real models")
    return points


def _launch(arguments: Any, runner: PlannedRunner, caps: Shape | None) -> Launch:
    return Launch(
        target=arguments.model_path,
        head=None if drafts_by_own_layer(arguments) else arguments.speculative_draft_model_path,
        device=runner.device,
        dtype=str(runner.dtype).removeprefix("torch."),
        cache_bytes=runner.kv_cache_dtype.itemsize,
        tokens=arguments.max_total_tokens,
        requests=arguments.max_running_requests,
        caps=caps,
        vocabulary=runner.model_config.vocab_size,
    )


def main() -> None:
    """For the process that ``eagle-plugin doctor`` starts."""
    answer("sglang", version.installed(), "eagle_plugin", judge)


if __name__ == "__main__":
    main()
