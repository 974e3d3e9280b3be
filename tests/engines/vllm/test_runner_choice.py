"""Which of vLLM's model runners serves trees: V1, or V2 where the user asks for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig, VllmConfig
from vllm.config import vllm as vllm_config_module
from vllm.engine.arg_utils import EngineArgs
from vllm_configs import DEFAULTS, configure, needs

from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.vllm import runner_choice, unsupported

pytestmark = pytest.mark.usefixtures("lines")


def encoder_cache(connector: str, **extra: Any) -> Any:
    given = ECTransferConfig(ec_connector=connector, ec_role="ec_producer", ec_connector_extra_config=extra)
    return lambda config: object.__setattr__(config, "ec_transfer_config", given)


def profiled_by_proton(config: VllmConfig) -> None:
    needs("profiler_config", "profiler", "proton")(config)
    needs("profiler_config", "proton_graph_attribution", True)(config)


def reads_n_grams(config: VllmConfig) -> None:
    arch = replace(config.model_config.model_arch_config, architectures=["LongcatFlashNgramForCausalLM"])
    needs("model_config", "model_arch_config", arch)(config)


def test_a_v1_runner_serves_where_vllm_would_take_v2(
    target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does by itself wherever Triton can be used: on GPUs, and on a CPU with triton-cpu."""
    assert not configure(target, head).use_v2_model_runner and lines == []
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    made = configure(target, head)
    assert made.parallel_config.worker_cls == unsupported.WORKERS["cpu"] and not made.use_v2_model_runner
    (line,) = lines
    assert line.endswith("trees are served by vLLM's V1 model runner in place of V2 (EAGLE_VLLM_RUNNER=v2 keeps V2)")
    # Only where the plugin serves, in every process that the configuration travels to.
    assert not pickle.loads(pickle.dumps(made)).use_v2_model_runner
    plain = EngineArgs(model=str(target), **DEFAULTS).create_engine_config()
    assert plain.use_v2_model_runner


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (needs("attention_config", "hisparse_config", object()), "HiSparse"),
        (lambda config: object.__setattr__(config, "watermark_config", object()), "watermarking"),
        (lambda config: object.__setattr__(config, "aux_output_config", SimpleNamespace(enabled=True)), "auxiliary"),
        (needs("model_config", "return_sampling_mask", True), "--return-sampling-mask"),
        (needs("model_config", "enable_trace_replay", True), "--enable-trace-replay"),
        (needs("parallel_config", "enable_batch_sharded_sampling", True), "batch-sharded sampling"),
        (profiled_by_proton, "proton_graph_attribution of --profiler-config"),
        (encoder_cache("ECCPUConnector"), "--ec-transfer-config ECCPUConnector"),
        (encoder_cache("ECMooncakeConnector", cross_encoder_cache=True), "cross_encoder_cache of --ec-transfer-config"),
        (reads_n_grams, "target LongcatFlashNgramForCausalLM"),
    ],
)
def test_what_only_the_v2_runner_has(
    change: Any, named: str, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    config = configure(target, head)
    change(config)
    (reason,) = unsupported.unsupported_reasons(config)
    assert named in reason and reason.endswith(": it is not served yet, vLLM has it in its V2 model runner only")


@pytest.mark.parametrize(
    ("variables", "v2", "logged"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, True, "V2 model runner"),
        ({"EAGLE_VLLM_RUNNER": "v2"}, True, "V2 model runner"),
        ({"EAGLE_VLLM_RUNNER": "v1", "VLLM_USE_V2_MODEL_RUNNER": "1"}, False, "in place of V2"),
        ({"EAGLE_VLLM_RUNNER": "v2", "VLLM_USE_V2_MODEL_RUNNER": "0"}, False, "V1 serves the trees"),
    ],
)
def test_a_user_who_asks_for_a_runner_gets_it(
    variables: dict[str, str],
    v2: bool,
    logged: str,
    target: Path,
    head: Path,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = configure(target, head)
    assert made.parallel_config.worker_cls == unsupported.WORKERS["cpu"]
    assert made.use_v2_model_runner == pickle.loads(pickle.dumps(made)).use_v2_model_runner == v2
    assert len(lines) == 1 and logged in lines[0]


@pytest.mark.parametrize(("with_triton", "named"), [(True, ""), (False, "V1 model runner applies none beside")])
@pytest.mark.parametrize("installed", [False, True])
def test_no_logits_processor_of_a_user_is_dropped(
    with_triton: bool,
    named: str,
    installed: bool,
    target: Path,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's V2 runner applies them beside speculation, and would be replaced."""
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", with_triton)
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    config = configure(target, head)
    assert config.use_v2_model_runner == with_triton and unsupported.unsupported_reasons(config) == []
    if installed:
        package = tmp_path / "some_package-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text("[vllm.logits_processors]\none = some.module:Processor\n")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        needs("model_config", "logits_processors", ["some.module:Processor"])(config)
    (reason,) = unsupported.unsupported_reasons(config)
    assert "some.module:Processor" in reason and "not applied along trees yet" in reason
    assert reason.endswith("speculation") == (not with_triton) and named in reason


def test_what_the_v2_runner_does_not_serve_is_left_to_v1(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    monkeypatch.setenv("EAGLE_VLLM_RUNNER", "v2")
    config = configure(target, head)
    assert config.use_v2_model_runner
    needs("parallel_config", "data_parallel_size", 2)(config)
    assert runner_choice.choose_runner(config)[0]
    monkeypatch.setattr(type(config.model_config), "is_moe", True)
    assert runner_choice.choose_runner(config) == (
        False,
        "--data-parallel-size with target LlamaForCausalLM: trees are served by vLLM's V1 model runner, not by V2 yet",
    )


def test_an_unknown_runner_is_one_sentence(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_VLLM_RUNNER", "v3")
    with pytest.raises(StartRefused, match="EAGLE_VLLM_RUNNER is 'v3', wanted v1 or v2"):
        configure(target, head)
