"""LoRA adapters on a CPU: stock SGLang pins memory wherever it prepares them, which needs an accelerator.

Its default kernels of adapters are Triton's as well; those of the backend `torch_native` run on every device.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.overrides import TorchFunctionMode

logger = logging.getLogger("eagle_sglang_cpu")

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
# Everything by which adapters and their batches get memory.
PINNING = ("load_lora_adapter", "load_lora_adapter_from_tensors", "prepare_lora_batch")


class Unpinned(TorchFunctionMode):
    """Inside of it, memory that is asked for as pinned is ordinary memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, without its pinning."""
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def without_pinning(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of the manager without pinned memory."""
    with Unpinned():
        return method(*args, **kwargs)


def start_with_torch(start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Start the manager with the backend `torch_native`, whichever one was asked for."""
    asked = kwargs.get("lora_backend")
    if asked != "torch_native":
        logger.info("LoRA on a CPU: the backend torch_native serves instead of %s", asked)
        kwargs["lora_backend"] = "torch_native"
    without_pinning(start, *args, **kwargs)


def register() -> None:
    """Register the hooks."""
    HookRegistry.register(f"{MANAGER}.__init__", start_with_torch, HookType.AROUND)
    for name in PINNING:
        HookRegistry.register(f"{MANAGER}.{name}", without_pinning, HookType.AROUND)
