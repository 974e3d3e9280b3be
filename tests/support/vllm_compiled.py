"""An engine of vLLM with compiled models in a process of its own, which shares vLLM's compile cache with others.

Prints one line of JSON: the answers as token ids, and how many models came from that cache and went into it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SECONDS = 600  # to compile a tiny target and head on a busy machine
TREES = {"depth": 2, "topk": 4}


class Spoken(NamedTuple):
    """The output tokens of one engine, and its use of the cache."""

    answers: list[list[int]]
    loaded: int  # compiled models from the cache
    saved: int  # into the cache


def ask_compiled(target: Path, head: Path, cache: Path, plugin: bool) -> Spoken:
    """Start such an engine, whose flags are the same with the plugin and without."""
    command = [sys.executable, __file__, str(target), str(head), "plugin" if plugin else "stock"]
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"an engine ended with exit code {done.returncode}:\n{done.stderr[-6000:]}")
    return Spoken(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    from vllm.compilation.counter import compilation_counter
    from vllm_engines import engine, generate
    from word_prompts import make_prompts

    target, head, kind = sys.argv[1:]
    options = {"enforce_eager": False, "additional_config": {"eagle_plugin": TREES}}
    with engine(Path(target), Path(head), chain=kind == "stock", **TREES, **options) as llm:  # type: ignore[arg-type]
        answers = generate(llm, make_prompts(6), max_tokens=24)
    found = Spoken(answers, compilation_counter.num_aot_artifacts_loaded, compilation_counter.num_aot_artifacts_saved)
    print(json.dumps(found._asdict()))


if __name__ == "__main__":
    main()
