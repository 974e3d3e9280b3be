"""SGLang 0.5.23 as the bench's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from eagle_plugin.bench.engine import Engine
from eagle_plugin.bench.spec import ServerSpec, TreeShape

SHAPE = TreeShape(2, 4, 8)
SHAPES = (*map(TreeShape.chain, (1, 2, 3)), SHAPE, TreeShape(1, 4, 5), TreeShape(3, 4, 8))


def command(spec: ServerSpec, port: int) -> list[str]:
    """The launch command, with the caller's extra flags last so that they win."""
    flags: dict[str, object] = {
        "--model-path": spec.target,
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--host": "127.0.0.1",
        "--port": port,
        "--context-length": spec.context_length,
        "--max-total-tokens": spec.max_total_tokens,
        "--max-running-requests": spec.max_running_requests,
        "--mem-fraction-static": spec.memory_fraction,
    }
    if spec.mode != "plain":
        flags |= {
            "--speculative-algorithm": spec.algorithm,
            "--speculative-draft-model-path": spec.head,
            "--speculative-num-steps": spec.shape.steps,
            "--speculative-eagle-topk": spec.shape.topk,
            "--speculative-num-draft-tokens": spec.shape.draft_tokens,
        }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    # An idle SGLang scheduler spins on a whole core unless it is told to sleep.
    return [str(spec.python), "-m", "sglang.launch_server", *words, "--sleep-on-idle", *spec.extra_flags]


def environment(spec: ServerSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The CPU engine is chosen by a variable, the number of threads too."""
    added = {"SGLANG_USE_CPU_ENGINE": "1"} if spec.device == "cpu" else {}
    if spec.threads is not None:
        added |= {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    return added


def flush(client: httpx.Client) -> bool:
    """Empty the prefix cache; the server itself waits up to 10 s for running requests."""
    client.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    return True


def verify_rounds(chunk: Any) -> int | None:
    """A chunk of its own, before the usage, tells the rounds of the request."""
    extension = getattr(chunk, "sglext", None)
    details = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
    return int(details["spec_verify_ct"]) if details else None


ENGINE = Engine(
    name="sglang",
    distributions=("sglang",),
    plugin_list="SGLANG_PLUGINS",
    reserved_cores=0,
    plugin_shape=SHAPE,
    builtin_shape=SHAPE,  # the fastest on the demo's machine: `python benchmarks/builtin_best.py`
    sweep_shapes={"builtin": SHAPES, "plugin": SHAPES},
    command=command,
    environment=environment,
    version_path="/server_info",
    flush=flush,
    request_fields={"return_spec_tokens_details": True},
    verify_rounds=verify_rounds,
)
