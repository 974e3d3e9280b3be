"""The engine-free round of `make gpu` on fake CUDA tensors: what a GPU would refuse is found without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary, require_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException

from benchmarks.gpu import llama, models
from benchmarks.gpu.decoding import PlainDecoder, TreeDecoder
from benchmarks.gpu.models import SMALL
from benchmarks.gpu.phases import tensors_of
from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.accept import KVCaches

B, POSITIONS = 3, 300


class Ones:
    """Weights without random numbers: a torch without CUDA has no generator of CUDA numbers."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = torch.device(device), dtype

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.ones(rows, columns, device=self.device, dtype=self.dtype)

    def ones(self, n: int) -> torch.Tensor:
        return torch.ones(n, device=self.device, dtype=self.dtype)


@pytest.fixture
def decoder(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], TreeDecoder]:
    """Makes a tree decoder of the tiny Llama with a temperature."""
    monkeypatch.setattr(models, "Random", Ones)
    addresses = torch.zeros(8, dtype=torch.int64, device=CUDA)
    monkeypatch.setattr(llama.Cache, "for_moves", lambda _: KVCaches(addresses, addresses, B * POSITIONS))

    def make(temperature: float) -> TreeDecoder:
        target = SMALL.target(POSITIONS, "cuda")
        slot_table = torch.zeros(B, POSITIONS, dtype=torch.int32, device=CUDA)
        return TreeDecoder(target, SMALL.head(target, slot_table), slot_table, Shape(3, 4, 16), temperature)

    return make


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_round(decoder: Callable[[float], TreeDecoder], library: FakeLibrary, temperature: float) -> None:
    one = decoder(temperature)
    drafts = one.draft()
    verified = one.verify(drafts)
    path = one.tail(drafts, verified)
    one.extend(path)
    for tensor in tensors_of((drafts, verified, path, one.state, one.lengths, one.roots)):
        require_cuda("a result", tensor)
    assert library.launched.count("select_tree") == library.launched.count("verify_tree") == 1
    # The target's layers, and the head's in two levels and in extend.
    assert library.launched.count("tree_attention (Triton)") == SMALL.model.layers + 3


def test_a_step_of_plain_decoding(decoder: Callable[[float], TreeDecoder], library: FakeLibrary) -> None:
    one = decoder(0.0)
    require_cuda("tokens", PlainDecoder.step(one))


def test_the_control_fails(decoder: Callable[[float], TreeDecoder]) -> None:
    """A round that reads a value on the host."""
    with pytest.raises(DataDependentOutputException):
        decoder(0.0).lengths.tolist()
