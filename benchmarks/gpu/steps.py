"""The steps of `make gpu` in their order, and what each may raise."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from eagle_plugin.errors import UserError

SKIPPED = 3  # the exit code of a step that this machine cannot run; the last line of its output says why


class StepError(UserError):
    """What a step found to be wrong."""


class StepSkipped(Exception):
    """Why this machine cannot run a step; nothing is wrong with the plugin."""


class Setting(NamedTuple):
    """How a step runs."""

    device: str
    tiny: bool  # small models and few repeats, for a machine without a GPU
    engine: str | None = None  # of the step; None: it imports no engine

    @property
    def on_gpu(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.device.startswith("cuda")


class Step(NamedTuple):
    """A module of this folder with `run(setting) -> dict`, whose result goes to out/gpu/NAME.json."""

    name: str
    module: str
    what: str
    engine: str | None = None  # None: the step imports no engine, and counts for all of them

    def run(self, setting: Setting) -> dict[str, Any]:
        """Run it in this process; the result can be written as JSON."""
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        result: dict[str, Any] = module.run(setting._replace(engine=self.engine))
        return result


STEPS = (
    Step("environment", "environment", "device, driver and versions"),
    Step("build", "build", "csrc/cuda is compiled and loaded"),
    Step("kernels", "kernel_tests", "the kernel tests, with their tensors on the device"),
    Step("sanitizers", "sanitizers", "compute-sanitizer on compact_kv, verify_tree and select_tree"),
    Step("graphs", "graphs", "captured phases against eager ones, and no host wait"),
    Step("speed", "speed", "times of the kernels"),
    Step("equality", "equality", "text of an engine-free round equals plain decoding"),
    Step("round", "round_speed", "an engine-free round against bytes over bandwidth"),
    Step("training", "training", "heads learn on the device what they learn on a CPU, and how fast"),
    Step("text", "engine_text", "text of a real SGLang with the plugin equals plain decoding", "sglang"),
    Step("model", "model_speed", "a real model in SGLang: plain, SGLang's own EAGLE-3, the plugin", "sglang"),
    Step("server", "server", "the demo on a real server of SGLang", "sglang"),
    Step("vllm-selftest", "selftest", "the kernels as vLLM's launcher tests them before it chooses a worker", "vllm"),
    Step("vllm-model", "model_speed", "a real model in vLLM: plain, vLLM's own EAGLE-3, the plugin", "vllm"),
    Step("vllm-server", "server", "the demo on a real server of vLLM", "vllm"),
)
ENGINES = ("sglang", "vllm")


def steps_of(engine: str) -> list[Step]:
    """The steps without an engine, then those of this one."""
    return [step for step in STEPS if step.engine in (None, engine)]


def find(name: str) -> Step:
    """The step of this name; StepError for any other."""
    for step in STEPS:
        if step.name == name:
            return step
    raise StepError(f"there is no step {name!r}, wanted one of {', '.join(step.name for step in STEPS)}")
