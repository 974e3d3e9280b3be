"""Shows a fault of a stock engine, without the plugin: python tests/support/upstream.py NAME (--list: all names).

Runs with any Python: the engine is taken from its environment, .venv-vllm or .venv-sglang. Exit codes: 0 where the
fault is there, 1 where it is not, 2 where the command could not find out. With --patched the engine has the patch of
upstream/NAME. With --test the test of that patch is run: 0 where it fails with the stock engine and passes with the
patch, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import upstream_patches
from upstream_faults import BY_NAME, FAULTS, Fault, site_packages

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CALM = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# EAGLE_PLUGIN=0 switches the plugin off; the lists of plugins name none, or what SGLang needs on a CPU without AMX.
SETTINGS = {
    "vllm": {
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    },
    "sglang": {
        "SGLANG_PLUGINS": "eagle_sglang_cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "compat/sglang-cpu/src"))),
    },
}


def interpreter(engine: str) -> Path | None:
    """The Python that has the engine: of the checkout's environment, else this one; None where neither does."""
    own = ROOT / f".venv-{engine}/bin/python"
    if own.exists():
        return own
    return Path(sys.executable) if importlib.util.find_spec(engine) else None


def environment(engine: str, patched: Path | None = None) -> dict[str, str]:
    """What the engine runs with: the stock one, or the one in a folder that `upstream_patches.apply` has made."""
    settings = SETTINGS[engine]
    if patched is not None:
        # The stock engine's folders are linked: nothing is to be compiled into them.
        path = os.pathsep.join((str(patched), settings["PYTHONPATH"]))
        settings = settings | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **CALM, "EAGLE_PLUGIN": "0", **settings}


def show(fault: Fault, python: Path, patched: Path | None = None) -> int:
    """Run the reproduction in the engine's environment; returns its exit code."""
    command = [str(python), str(HERE / f"upstream_{fault.engine}.py"), fault.name]
    return subprocess.run(command, env=environment(fault.engine, patched), check=False).returncode


def try_patch(name: str, python: Path, folder: Path, patched: Path) -> int:
    """Run the test of a patch with the stock engine and with the patched one; returns 0 where only the patch passes."""
    engine, is_expected = upstream_patches.engine_of(name), True
    for what, settings in (("stock", environment(engine)), ("patched", environment(engine, patched))):
        done = upstream_patches.run_test(name, python, settings, folder / f"test-{what}")
        print(f"{name}, {what} engine:\n{done.stdout[-6000:]}{done.stderr[-2000:]}", flush=True)
        failed = upstream_patches.REASONS.get(name, "AssertionError")
        is_expected &= (done.returncode == 1 and failed in done.stdout) if what == "stock" else done.returncode == 0
    print(f"{name}: the test {'fails without the patch and passes with it' if is_expected else 'does not tell'}")
    return 0 if is_expected else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Show a fault of a stock engine, without the plugin.")
    parser.add_argument("name", nargs="?", choices=sorted(BY_NAME), metavar="NAME", help="the fault; --list prints all")
    parser.add_argument("--list", action="store_true", help="print all names, with what is wrong")
    parser.add_argument("--patched", action="store_true", help="with the patch of upstream/NAME")
    parser.add_argument("--test", action="store_true", help="run the test of the patch, without and with the patch")
    given = parser.parse_args()
    if given.list:
        for fault in FAULTS:
            print(f"{fault.name:24}{fault.summary}")
        return 0
    if given.name is None:
        parser.error("no fault is named: give one of `python tests/support/upstream.py --list`")
    fault = BY_NAME[given.name]
    python, packages = interpreter(fault.engine), site_packages(fault.engine)
    if python is None or packages is None:
        target = "env" if fault.engine == "sglang" else f"env-{fault.engine}"
        print(f"error: {fault.engine} is not installed, wanted for {fault.name}: run `make {target}`", file=sys.stderr)
        return 2
    if not given.patched and not given.test:
        return show(fault, python)
    if fault.name not in upstream_patches.NAMES:
        parser.error(f"{fault.name} has no patch: give one of {', '.join(upstream_patches.NAMES)}")
    with tempfile.TemporaryDirectory(prefix=f"{fault.name}-") as name:
        patched = Path(name) / "patched"
        upstream_patches.apply(fault.name, packages, patched)
        if given.test:
            return try_patch(fault.name, python, Path(name), patched)
        return show(fault, python, patched)


if __name__ == "__main__":
    sys.exit(main())
