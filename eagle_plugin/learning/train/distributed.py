"""One run on many processes, as torchrun starts them: the rank of this one, sums over all, DDP and FSDP2."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from eagle_plugin.learning.train.recipe import TrainError


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those of the run."""

    rank: int
    world: int
    device: torch.device
    parallel: Literal["ddp", "fsdp"] = "ddp"

    @property
    def writes(self) -> bool:
        """Whether this process writes the files and draws the bar."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.world > 1:
            dist.barrier()

    def wrap(self, module: nn.Module) -> nn.Module:
        """Make the gradients of `module` those of all processes (their mean)."""
        if self.world == 1:
            return module
        if self.parallel == "fsdp":
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.world,)))
            return module
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        # Buffers never change: sending the embedding with every forward would cost more than the gradients.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        # Gradients in the buckets that are exchanged, and not a second time beside them.
        options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(module, device_ids=device_ids, **options)


@contextlib.contextmanager
def join_ranks(device: Literal["auto", "cpu", "cuda"], parallel: Literal["ddp", "fsdp"]) -> Iterator[Ranks]:
    """Join the other processes that torchrun started; without torchrun this process is the only one.

    Raises:
        TrainError: the recipe wants a GPU and there is none for this process.
    """
    world, rank, local = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT.items())
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus == 0:
        raise TrainError("device is cuda, but torch sees no GPU here; set device to cpu, or correct the driver")
    if gpus and local >= gpus:
        raise TrainError(
            f"process {local} has no GPU of its own (torch sees {gpus}); start {gpus} with --nproc-per-node"
        )
    place = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(place)
    if world == 1:
        yield Ranks(0, 1, place)
        return
    # One process may wait for servers of hidden states, for a disk or for a store, while the others wait for it.
    dist.init_process_group("nccl" if gpus else "gloo", device_id=place if gpus else None, timeout=MOST_WAITING)
    yield Ranks(rank, world, place, parallel)
    # After an error this process just ends: while others wait for it in an all-reduce, NCCL can wait for them here, and
    # nobody would be told of the error.
    dist.destroy_process_group()


MOST_WAITING = timedelta(hours=1)  # more than any patience of a source of documents
_ENVIRONMENT = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


def hold_gradients(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Context for the forward and backward of one batch of an update: only the last one exchanges gradients."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    elif isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return contextlib.nullcontext()


def gather_whole(tensor: Tensor) -> Tensor:
    """A parameter or its optimiser state whole; every process must call it in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of `whole`, laid out as the parameter `like`."""
    whole = whole.to(like.device)
    if isinstance(like, DTensor) and whole.shape == like.shape:
        return distribute_tensor(whole, like.device_mesh, like.placements)
    return whole
