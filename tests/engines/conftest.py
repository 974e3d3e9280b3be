"""Fixtures of the tests of both engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def cuda_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What torch needs once per process to index fake CUDA tensors."""
    import fake_cuda

    torch.ops.load_library(str(fake_cuda.build_guard(tmp_path_factory.mktemp("fake-cuda"))))


@pytest.fixture
def library(cuda_guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The kernels of fake CUDA tensors; all tensors that the test makes are fake."""
    import fake_cuda

    with fake_cuda.fake_cuda(monkeypatch) as running:
        yield running
