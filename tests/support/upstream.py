"""Shows a fault of a stock engine, without the plugin: python tests/support/upstream.py NAME (--list: all names).

Runs with any Python: the engine is taken from its environment, .venv-vllm or .venv-sglang. Exit codes: 0 where the
fault is there, 1 where it is not, 2 where the command could not find out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from upstream_faults import BY_NAME, FAULTS, Fault

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


def show(fault: Fault) -> int:
    """Run the reproduction in the engine's environment; returns its exit code."""
    python = interpreter(fault.engine)
    if python is None:
        target = "env" if fault.engine == "sglang" else f"env-{fault.engine}"
        print(f"error: {fault.engine} is not installed, wanted for {fault.name}: run `make {target}`", file=sys.stderr)
        return 2
    environment = {**os.environ, **CALM, "EAGLE_PLUGIN": "0", **SETTINGS[fault.engine]}
    command = [str(python), str(HERE / f"upstream_{fault.engine}.py"), fault.name]
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Show a fault of a stock engine, without the plugin.")
    parser.add_argument("name", nargs="?", choices=sorted(BY_NAME), metavar="NAME", help="the fault; --list prints all")
    parser.add_argument("--list", action="store_true", help="print all names, with what is wrong")
    given = parser.parse_args()
    if given.list:
        for fault in FAULTS:
            print(f"{fault.name:24}{fault.summary}")
        return 0
    if given.name is None:
        parser.error("no fault is named: give one of `python tests/support/upstream.py --list`")
    return show(BY_NAME[given.name])


if __name__ == "__main__":
    sys.exit(main())
