"""vLLM 0.32 as the bench's server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from eagle_plugin.bench.engine import Engine
from eagle_plugin.bench.spec import ServerSpec, TreeShape

SHAPE = TreeShape(2, 4, 6)


def command(spec: ServerSpec, port: int) -> list[str]:
    """The launch command, with the caller's extra flags last so that they win; ValueError for a builtin tree."""
    block = 128 if spec.device == "cpu" else 16  # the engine's own sizes, named so that blocks can be counted
    flags: dict[str, object] = {
        "--dtype": spec.dtype,
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": spec.context_length,
        "--max-num-seqs": spec.max_running_requests,
        "--gpu-memory-utilization": spec.memory_fraction,
        "--block-size": block,
        "--num-gpu-blocks-override": -(-spec.max_total_tokens // block),
    }
    if spec.mode != "plain":
        speculation = {
            "method": spec.algorithm.lower(),
            "model": str(spec.head),
            "num_speculative_tokens": spec.shape.draft_tokens - 1,
        }
        flags |= {"--speculative-config": json.dumps(speculation), "--per-request-spec-decode-metrics": "summary"}
    if spec.mode == "builtin" and spec.shape != TreeShape.chain(spec.shape.steps):
        raise ValueError(
            f"vLLM's own speculation drafts chains only, found the shape {spec.shape}; "
            f"wanted K/1/K+1, for example {TreeShape.chain(spec.shape.steps)}"
        )
    if spec.mode == "plugin":
        options = {"depth": spec.shape.steps, "topk": spec.shape.topk}
        flags["--additional-config"] = json.dumps({"eagle_plugin": options})
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    launch = [str(spec.python), "-m", "vllm.entrypoints.cli.main", "serve", str(spec.target)]
    # "default" is what clients call the model that do not ask for its name. Compiled, a start takes minutes.
    names = ["--served-model-name", spec.target.name, "default"]
    return [*launch, *words, *names, "--enforce-eager", "--disable-uvicorn-access-log", *spec.extra_flags]


def environment(spec: ServerSpec, base: Mapping[str, str]) -> dict[str, str]:
    """No telemetry, the route that empties the prefix cache, and the threads of the worker."""
    added = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    if spec.device == "cpu":
        # GiB, so that the engine does not reserve a share of all memory; the number of blocks is a flag.
        added["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if spec.threads is not None:
        added |= {"OMP_NUM_THREADS": str(spec.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return added


def flush(client: httpx.Client) -> bool:
    """Empty the prefix cache; the engine refuses while a request holds blocks of it."""
    return bool(client.post("/reset_prefix_cache").raise_for_status().json()["success"])


def verify_rounds(chunk: Any) -> int | None:
    """The last chunk, with the usage, tells in how many steps drafts were verified."""
    metrics = getattr(chunk, "metrics", None)
    details = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    return int(details["num_spec_steps"]) if details else None


ENGINE = Engine(
    name="vllm",
    distributions=("vllm", "vllm-cpu"),
    plugin_list="VLLM_PLUGINS",
    reserved_cores=1,  # as the engine's own thread binding does on one socket
    plugin_shape=SHAPE,
    builtin_shape=TreeShape.chain(2),
    sweep_shapes={
        "builtin": tuple(map(TreeShape.chain, (1, 2, 3, 4))),
        "plugin": (TreeShape.chain(2), SHAPE, TreeShape(3, 3, 8), TreeShape(3, 4, 16)),
    },
    command=command,
    environment=environment,
    version_path="/version",
    flush=flush,
    request_fields={},
    verify_rounds=verify_rounds,
)
