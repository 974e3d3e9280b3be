"""Makes the packages of compat/sglang-cpu importable, and skips this folder where the real ones are installed."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
SOURCE = Path(__file__).resolve().parents[2] / "compat" / "sglang-cpu" / "src"

if importlib.util.find_spec("eagle_sglang_cpu") is None:
    sys.path.insert(0, str(SOURCE))

from eagle_sglang_cpu.conflicts import conflict_message  # noqa: E402

collect_ignore_glob = ["test_*.py"] if conflict_message() else []
