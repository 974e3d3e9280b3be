"""The self-test's inputs on fake CUDA tensors: every tensor of a kernel is on the device and contiguous, and the toy
round, which is captured, reads nothing on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, FakeLibrary
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from eagle_plugin.selftest import cache_kernels, sampling_kernels, toy_round, tree_kernels
from eagle_plugin.selftest.shapes import ModelShape, Sizes
from eagle_plugin.selftest.trial import Check, Trial

MODEL = ModelShape(heads=4, kv_heads=2, head_dim=32, vocabulary=600, draft_vocabulary=300, steps=3, topk=4, width=16)
# Not attention, before whose launch the host reads the lengths of prefixes. The toy round has it.
CHECKS = [
    check
    for check in tree_kernels.CHECKS + sampling_kernels.CHECKS + cache_kernels.CHECKS
    if check.name != "tree_attention"
]


@pytest.fixture
def trial(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Without a random generator, which a torch without CUDA does not have."""
    none = SimpleNamespace(manual_seed=lambda seed: None)
    monkeypatch.setattr(torch, "Generator", lambda device: none)
    addresses = lambda caches: tuple(torch.zeros(len(caches), dtype=torch.int64, device=CUDA) for _ in range(2))  # noqa: E731
    for module in (cache_kernels, toy_round):
        monkeypatch.setattr(module, "places_of", addresses)
    return Trial(MODEL, Sizes(3, 40, 128, narrow=(20, 60), walked=(1, 3), vocabulary=600, replays=1), CUDA, 1)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_kernel_gets_tensors_of_the_gpu(check: Check, trial: Trial, library: FakeLibrary) -> None:
    """Up to the first value that is compared, which fake tensors do not have."""
    with pytest.raises(DataDependentOutputException):
        check.run(trial)
    assert check.name in library.launched


@pytest.mark.parametrize("greedy", [True, False])
def test_the_toy_round_reads_nothing_on_the_host(greedy: bool, trial: Trial, library: FakeLibrary) -> None:
    result = toy_round.ToyRound(trial, greedy).run()
    assert result.features.device.type == result.accepted.tokens.device.type == "cuda"
    launched = set(library.launched)
    assert {"topk_log_softmax", "grow_level", "select_tree", "verify_tree", "compact_kv", "store_kv"} <= launched
    assert "tree_attention (Triton)" in launched and ("propose" in launched) is not greedy


def test_the_controls_fail(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(trial: Trial, low: int, high: int, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    monkeypatch.setattr(Trial, "randint", on_cpu)
    with pytest.raises(Exception, match="is on cpu, wanted a CUDA device"):
        sampling_kernels.CHECKS[0].run(trial)
