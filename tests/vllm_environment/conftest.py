"""These tests run in vLLM's environment; tests/test_vllm_environment.py runs them there."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Without these vLLM asks the network, phones home, and reserves half of the memory.
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # One process: nothing outlives a test that fails.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
