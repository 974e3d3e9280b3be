"""The memory of a GPU: whether weights fit into it, and what a command says when it runs out."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle_plugin.common.devices import DeviceError, default_device
from eagle_plugin.common.errors import first_line
from eagle_plugin.common.json_files import kept_object

if TYPE_CHECKING:
    import torch

ROOM = 1.2  # of the bytes of the weights: hidden states and the cache come beside them
GIB = 2**30


def device_for(folders: Iterable[Path]) -> Literal["cpu", "cuda"]:
    """Where a command that was given no device computes with the models in these folders.

    A GPU if torch sees one, and the CPU, with a line on stderr, if their weights do not fit into its free memory: the
    GPU may belong to a server.
    """
    import torch

    if default_device() == "cpu":
        return "cpu"
    weights = sum(map(loaded_bytes, folders))
    try:
        free = torch.cuda.mem_get_info()[0]
    except RuntimeError:  # not even the context of this process fits
        free = 0
    if weights * ROOM <= free:
        return "cuda"
    print(
        f"computing on the CPU: {free / GIB:.1f} GiB of the GPU are free, and the weights need "
        f"{weights * ROOM / GIB:.1f} GiB; end what uses the GPU, or name it with --device cuda to try it all the same",
        file=sys.stderr,
    )
    return "cpu"


def loaded_bytes(folder: Path) -> int:
    """The bytes of a checkpoint's weights as transformers loads them: those of its files, or MXFP4 as bfloat16."""
    files = sorted(folder.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in files)
    method = kept_object(folder / "config.json").get("quantization_config")
    if not isinstance(method, dict) or method.get("quant_method") != "mxfp4":
        return stored
    return stored if _keeps_mxfp4() and not method.get("dequantize") else stored + sum(map(_unpacked_bytes, files))


def _keeps_mxfp4() -> bool:
    """Whether transformers has what it needs to compute with MXFP4 on this GPU; else it makes bfloat16 of it."""
    import torch
    from transformers.utils import is_accelerate_available, is_kernels_available, is_triton_available

    has_kernels = is_accelerate_available() and is_triton_available("3.4.0") and is_kernels_available()
    return has_kernels and torch.cuda.get_device_capability() >= (7, 5)


def _unpacked_bytes(file: Path) -> int:
    """The bytes that become more when the MXFP4 tensors of a file become bfloat16: two numbers in each byte."""
    from safetensors import safe_open

    more = 0
    with safe_open(str(file), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if name.endswith(("_blocks", "_scales")):
                size = math.prod(tensors.get_slice(name).get_shape())
                more += 3 * size if name.endswith("_blocks") else -size
    return more


@contextlib.contextmanager
def naming_lack(device: str | torch.device, first: str = "") -> Iterator[None]:
    """Within this block an error of torch that says that a GPU has no memory left is one sentence.

    first: what to try before all else, as an imperative.

    Raises:
        DeviceError: that sentence.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        cure = f"{first}, end" if first else "end"
        raise DeviceError(
            f"the memory of {device} ran out ({first_line(error)[:200].rstrip('. ')}); {cure} what else uses this GPU, "
            "or compute on the CPU with --device cpu (device: cpu in a recipe of training)"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch's allocator says so by its exception, or the driver, Triton, cuBLAS or our own launch by words."""
    import torch

    text = str(error).lower()
    is_named = isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
    return is_named or isinstance(error, torch.OutOfMemoryError)
