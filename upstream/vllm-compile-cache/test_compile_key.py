# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What decides which operations a graph has is in the key of the compile cache."""

from vllm.config import AttentionConfig, ParallelConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def test_key_has_the_worker():
    keys = {
        ParallelConfig(worker_cls=worker_cls).compute_hash()
        for worker_cls in ("vllm.v1.worker.gpu_worker.Worker", "another.Worker")
    }
    assert len(keys) == 2


def test_key_has_the_class_of_a_backend():
    backend = AttentionBackendEnum.FLASH_ATTN
    keys = [AttentionConfig().compute_hash()]
    register_backend(backend, "another.Backend")
    try:
        keys.append(AttentionConfig().compute_hash())
    finally:
        backend.clear_override()
    keys.append(AttentionConfig().compute_hash())
    assert keys[0] == keys[2] != keys[1]
