"""vLLM 0.32 as the bench's server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from eagle_plugin.bench.cache_groups import cache_groups
from eagle_plugin.bench.engine import Engine
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.shapes import CPU_DRAFTS, shape_for

SHARED_GPU_THOUSANDTHS = 900  # of a GPU's whole memory, for the weights and caches of all servers that share it


def command(spec: ServerSpec, port: int) -> list[str]:
    """The launch command; the caller's extra flags come last, so they override ours. ValueError for a builtin tree."""
    block = (
        128 if spec.device == "cpu" else 16
    )  # vLLM's defaults, given explicitly because the number of blocks depends on them
    flags: dict[str, object] = {
        "--dtype": spec.dtype,
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": spec.context_length,
        "--max-num-seqs": spec.max_running_requests,
        "--block-size": block,
    }
    if spec.device != "cpu" and spec.gpu_servers:  # the cache has what the weights leave of the server's part
        flags["--gpu-memory-utilization"] = SHARED_GPU_THOUSANDTHS // spec.gpu_servers / 1000
    if spec.device == "cpu" and spec.max_total_tokens:
        groups = cache_groups(spec.target, spec.head)
        flags["--num-gpu-blocks-override"] = groups * -(-spec.max_total_tokens // block)
    if spec.mode != "plain":
        speculation = {
            "method": spec.speculation.lower(),
            "model": str(spec.head),
            "num_speculative_tokens": spec.shape.width - 1,
            **spec.vllm_options,
        }
        flags |= {"--speculative-config": json.dumps(speculation), "--per-request-spec-decode-metrics": "summary"}
    if spec.mode == "builtin" and spec.shape != Shape.chain(spec.shape.steps):
        raise ValueError(
            f"vLLM's own speculation drafts chains only, found the shape {spec.shape}; "
            f"wanted K/1/K+1, for example {Shape.chain(spec.shape.steps)}"
        )
    if spec.mode == "plugin":
        options: dict[str, object] = {"depth": spec.shape.steps, "topk": spec.shape.topk}
        options |= {"async_scheduling": True} if spec.is_async else {}
        flags["--additional-config"] = json.dumps({"eagle_plugin": options})
    args = [arg for flag, value in flags.items() for arg in (flag, str(value))]
    launch = [str(spec.python), "-m", "vllm.entrypoints.cli.main", "serve", str(spec.target)]
    # Clients that do not ask for the model's name use "default". On a CPU compilation takes minutes and gains little;
    # a GPU without its graphs would be no baseline.
    names = ["--served-model-name", spec.target.name, "default"]
    eager = ["--enforce-eager"] if spec.device == "cpu" else []
    return [*launch, *args, *names, *eager, "--disable-uvicorn-access-log", *spec.extra_flags]


def environment(spec: ServerSpec, base: Mapping[str, str]) -> dict[str, str]:
    """No telemetry; the route that empties the prefix cache; the threads of the worker.

    ValueError for the plugin on a GPU without EAGLE_PLUGIN=force, before a target is loaded for nothing.
    """
    found = base.get("EAGLE_PLUGIN")
    if spec.mode == "plugin" and spec.device == "cuda" and found != "force":
        raise ValueError(
            f"on a GPU the plugin serves in vLLM only with EAGLE_PLUGIN=force, found {found!r}: set it before this "
            "command (docs/gpu.md says what no GPU has run yet), or give --device cpu"
        )
    added = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    # A server may be paused in the middle of a step, while others are measured for longer than vLLM's five minutes.
    added["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "86400"
    if spec.device == "cpu":
        # In GiB; without it vLLM reserves a share of all memory. The number of blocks is set by a flag.
        added["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if spec.threads is not None:
        added |= {"OMP_NUM_THREADS": str(spec.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return added


def flush(client: httpx.Client) -> bool:
    """Empty the prefix cache; vLLM refuses while a request holds blocks of it."""
    return bool(client.post("/reset_prefix_cache").raise_for_status().json()["success"])


def verify_rounds(chunk: Any) -> int | None:
    """The rounds of a request, from the last chunk, the one with the usage.

    vLLM counts only the steps that verified drafts. The policy serves plain rounds too, and a round of either kind
    yields one token of the target's own: there are as many rounds as tokens after the first one that no draft gave.
    These are less than the steps of a request without plain rounds whose last draft was cut off: then the steps count.
    """
    details = _details(chunk)
    if not details or chunk.usage is None:
        return None
    own = chunk.usage.completion_tokens - 1 - int(details["num_accepted_draft_tokens"])
    return max(int(details["num_spec_steps"]), own)


def accepted_drafts(chunk: Any) -> tuple[int, ...] | None:
    """The histogram in the same chunk; rounds without drafts are added to those with 0 accepted, as in SGLang."""
    details, rounds = _details(chunk), verify_rounds(chunk)
    if not details or rounds is None:
        return None
    none, *more = map(int, details["acceptance_histogram"])
    return (none + rounds - int(details["num_spec_steps"]), *more)


def _details(chunk: Any) -> dict[str, Any] | None:
    metrics = getattr(chunk, "metrics", None)
    return metrics.get("speculative_decoding") if isinstance(metrics, dict) else None


ENGINE = Engine(
    name="vllm",
    distributions=("vllm", "vllm-cpu"),
    plugin_list="VLLM_PLUGINS",
    cpu_modules={},
    reserved_cores=1,  # as many as vLLM's own thread binding reserves on one socket
    drafts=CPU_DRAFTS,
    builtin_shape=Shape.chain(2),
    sweep_shapes={
        "builtin": tuple(map(Shape.chain, (1, 2, 3, 4))),
        "plugin": (Shape.chain(2), shape_for(CPU_DRAFTS), Shape(3, 3, 8), Shape(3, 4, 16)),
    },
    command=command,
    environment=environment,
    version_path="/version",
    flush=flush,
    request_fields={},
    verify_rounds=verify_rounds,
    accepted_drafts=accepted_drafts,
)
