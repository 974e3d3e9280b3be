"""The steps of `make gpu` in the order in which their results are wanted, and what each may raise."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.common.errors import UserError

SKIPPED = 3  # the exit code of a step that this machine cannot run; the last line of its output says why


class StepError(UserError):
    """What a step found to be wrong."""


class StepEnded(UserError):
    """The step is ended from outside: no engine of it has failed, and none is asked any more."""


class StepSkipped(Exception):
    """Why this machine cannot run a step; nothing is wrong with the plugin."""


class Setting(NamedTuple):
    """How a step runs."""

    device: str
    tiny: bool  # small models and few repeats, for a machine without a GPU
    engine: str | None = None  # of the step; None: it imports no engine
    short: bool = False  # fewer questions, repeats and cases, for a machine that is there for minutes
    # Called with what is known of the result so far: a step that fails or is ended later leaves it.
    keep: Callable[[dict[str, Any]], None] = lambda result: None
    logs: Path | None = None  # a folder for the logs of programs that the step starts; None: they go with the step

    @property
    def on_gpu(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.device.startswith("cuda")


class Step(NamedTuple):
    """A module of this folder with `run(setting) -> dict`, whose result goes to out/gpu/NAME.json.

    expected, limit: seconds on a Hopper GPU with 16 cores, of the short form where there is one. With --minutes a step
    starts if so much as expected is left, and is ended at its limit.
    """

    name: str
    module: str
    what: str
    expected: int
    limit: int
    engine: str | None = None  # None: the step imports no engine, and counts for all of them
    has_short: bool = False  # whether it does less with `Setting.short`
    beside: str | None = None  # the engine whose packages have libraries that it compares with

    def run(self, setting: Setting) -> dict[str, Any]:
        """Run it in this process; the result can be written as JSON."""
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        result: dict[str, Any] = module.run(setting._replace(engine=self.engine))
        return result


# What decides comes first: what rounds of large models cost in the engines. A new step goes where its result is wanted.
STEPS = (
    Step("environment", "environment", "device, driver and versions", 5, 60),
    Step("build", "build", "csrc/cuda is compiled and loaded", 20, 120),
    # Beside another version of apache-tvm-ffi the library is another one.
    Step("vllm-build", "build", "the same with the packages that come with vLLM", 20, 120, "vllm"),
    Step("vllm-yardstick", "yardstick", "what rounds of large models cost in vLLM", 160, 300, "vllm", True),
    Step("yardstick", "yardstick", "what rounds of large models cost in SGLang", 140, 260, "sglang", True),
    Step(
        "vllm-model", "model_speed", "a real model in vLLM: plain, its own EAGLE-3, the plugin", 190, 330, "vllm", True
    ),
    Step(
        "model", "model_speed", "a real model in SGLang: plain, its own EAGLE-3, the plugin", 180, 270, "sglang", True
    ),
    Step("round", "round_speed", "an engine-free round against bytes over bandwidth", 95, 150),
    Step("speed", "speed", "times of the kernels", 40, 90, beside="vllm"),
    Step("kernels", "kernel_tests", "the kernel tests, with their tensors on the device", 30, 90, has_short=True),
    Step("text", "engine_text", "text of a real SGLang with the plugin equals plain decoding", 150, 300, "sglang"),
    Step("graphs", "graphs", "captured phases against eager ones, and no host wait", 40, 120),
    Step("equality", "equality", "text of an engine-free round equals plain decoding", 40, 120),
    Step("vllm-selftest", "selftest", "the kernels as vLLM's launcher tests them before it starts", 20, 90, "vllm"),
    Step("server", "server", "the demo on a real server of SGLang", 240, 400, "sglang"),
    Step("vllm-server", "server", "the demo on a real server of vLLM", 300, 500, "vllm"),
    Step("training", "training", "heads learn on the device what they learn on a CPU, and how fast", 60, 150),
    Step("sanitizers", "sanitizers", "compute-sanitizer on compact_kv, verify_tree and select_tree", 150, 300),
)
ENGINES = ("sglang", "vllm")
ALL = "all"  # as --engine: the steps of every engine


def steps_of(engine: str) -> list[Step]:
    """The steps without an engine and those of this one, in their order."""
    return [step for step in STEPS if engine == ALL or step.engine in (None, engine)]


def find(name: str) -> Step:
    """The step of this name; StepError for any other."""
    for step in STEPS:
        if step.name == name:
            return step
    raise StepError(f"there is no step {name!r}, wanted one of {', '.join(step.name for step in STEPS)}")
