"""SGLang as the bench's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from eagle_plugin.bench.engine import Engine
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.common.devices import gpu_generation
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.target_table import SGLANG_CHAINED
from eagle_plugin.policy.shapes import CPU_SHAPE

# Of several servers that start at once on a CPU, each counts what the others take meanwhile as its own weights; the
# cache is limited by its tokens.
CPU_MEMORY_FRACTION = 0.6
# Of what is free on a GPU when the server starts. Servers that share it start one after the other; what is left is for
# activations, CUDA graphs and the next ones.
SHARED_GPU_FRACTION = 0.85
SHAPES = (*map(Shape.chain, (1, 2, 3)), CPU_SHAPE, Shape(1, 4, 5), Shape(3, 4, 8))


def command(spec: ServerSpec, port: int) -> list[str]:
    """The launch command; the caller's extra flags come last, so they override ours."""
    flags: dict[str, object] = {
        "--model-path": spec.target,
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--host": "127.0.0.1",
        "--port": port,
        "--context-length": spec.context_length,
        "--max-total-tokens": spec.max_total_tokens or None,
        "--max-running-requests": spec.max_running_requests,
        "--mem-fraction-static": _memory_fraction(spec),
    }
    if spec.mode != "plain":
        flags |= {
            "--speculative-algorithm": spec.speculation,
            "--speculative-draft-model-path": spec.head,
            "--speculative-num-steps": spec.shape.steps,
            "--speculative-eagle-topk": spec.shape.topk,
            "--speculative-num-draft-tokens": spec.shape.width,
        }
        if spec.shape.topk > 1 and _is_chained(spec):
            flags["--attention-backend"] = "triton"  # with the one that SGLang would choose it ends
    args = [arg for flag, value in flags.items() if value is not None for arg in (flag, str(value))]
    # Without --sleep-on-idle an idle SGLang scheduler keeps one core busy.
    return [str(spec.python), "-m", "sglang.launch_server", *args, "--sleep-on-idle", *spec.extra_flags]


def _is_chained(spec: ServerSpec) -> bool:
    """Whether SGLang would choose an attention backend for this target and GPU with which it takes no trees."""
    if spec.device == "cpu" or gpu_generation() != 10:
        return False
    try:
        return not SGLANG_CHAINED.isdisjoint(read_config(spec.target).get("architectures") or ())
    except HeadError:  # a name on a model hub
        return False


def _memory_fraction(spec: ServerSpec) -> float | None:
    """For weights and cache; None: the engine's choice."""
    if spec.device == "cpu":
        return CPU_MEMORY_FRACTION
    return SHARED_GPU_FRACTION if spec.gpu_servers else None


def environment(spec: ServerSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose the CPU engine and the number of threads."""
    added = {"SGLANG_USE_CPU_ENGINE": "1"} if spec.device == "cpu" else {}
    if spec.threads is not None:
        added |= {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    return added


def flush(client: httpx.Client) -> bool:
    """Empty the prefix cache; the server itself waits up to 10 s for running requests."""
    client.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    return True


def verify_rounds(chunk: Any) -> int | None:
    """SGLang sends the verify rounds of a request in a separate chunk before the usage."""
    details = _details(chunk)
    return int(details["spec_verify_ct"]) if details else None


def accepted_drafts(chunk: Any) -> tuple[int, ...] | None:
    """The histogram in the same chunk; the plugin's rounds without drafts are among those with 0 accepted drafts."""
    details = _details(chunk)
    return tuple(map(int, details.get("spec_correct_drafts_histogram") or ())) if details else None


def _details(chunk: Any) -> dict[str, Any] | None:
    extension = getattr(chunk, "sglext", None)
    return extension.get("spec_tokens_details") if isinstance(extension, dict) else None


ENGINE = Engine(
    name="sglang",
    distributions=("sglang",),
    plugin_list="SGLANG_PLUGINS",
    cpu_modules={"sgl_kernel": "install eagle-plugin-sglang-cpu: pip install ./compat/sglang-cpu, or its wheel"},
    reserved_cores=0,
    drafts=CPU_SHAPE.width - 1,
    builtin_shape=CPU_SHAPE,  # the fastest on the demo's machine: `eagle-plugin bench`
    sweep_shapes={"builtin": SHAPES, "plugin": SHAPES},
    command=command,
    environment=environment,
    version_path="/server_info",
    flush=flush,
    request_fields={"return_spec_tokens_details": True},
    verify_rounds=verify_rounds,
    accepted_drafts=accepted_drafts,
)
