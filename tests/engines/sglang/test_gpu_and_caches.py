"""What a GPU and the KV caches must have, so that our worker serves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from eagle_plugin.runtime.gpu import Gpu, unsupported_gpu
from eagle_plugin.sglang.caches import unsupported_cache

GOOD = Gpu("NVIDIA H100", (9, 0), True, True, "")


@pytest.mark.parametrize(
    ("gpu", "head_dims", "wanted"),
    [
        (GOOD, [128, 128], None),
        (GOOD._replace(capability=(8, 0)), [256, 64], None),
        (GOOD._replace(name="Tesla T4", capability=(7, 5)), [128], "Tesla T4: compute capability 7.5, at least 8.0"),
        (GOOD._replace(has_triton=False), [128], "Triton is not installed"),
        (GOOD._replace(missing_library="nvcc failed"), [128], "native library for CUDA: nvcc failed"),
        (GOOD, [128, 512], "head_dim 512: at most 256 is served on a GPU"),
        (GOOD._replace(is_nvidia=False, name="MI300"), [128], "device MI300: only NVIDIA GPUs are served"),
    ],
)
def test_what_a_gpu_must_have(gpu: Gpu, head_dims: list[int], wanted: str | None) -> None:
    reasons = unsupported_gpu(gpu, head_dims)
    assert len(reasons) == (wanted is not None)
    assert wanted is None or wanted in reasons[0]


@pytest.mark.parametrize(
    ("capability", "caches", "refused"),
    [
        ((8, 0), ["bfloat16", "float8_e4m3fn"], True),
        ((8, 6), ["float8_e4m3fn"], True),
        ((8, 0), ["float8_e5m2"], False),
        ((8, 9), ["float8_e4m3fn"], False),
    ],
)
def test_8_bit_caches_that_a_gpu_has(capability: tuple[int, int], caches: list[str], refused: bool) -> None:
    reasons = unsupported_gpu(GOOD._replace(capability=capability), [128], caches)
    assert len(reasons) == refused
    assert not refused or "has no KV caches of float8_e4m3fn, 8.9 has; --kv-cache-dtype fp8_e5m2" in reasons[0]


def test_the_current_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_plugin.runtime import gpu

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(gpu.attention, "_triton", lambda: None)
    monkeypatch.setattr(gpu.loader, "load", lambda kind: None)
    reasons = unsupported_gpu(Gpu.current(), [128])
    assert len(reasons) == 2 and "Triton" in reasons[0] and "could be built" in reasons[1]

    def fails(kind: str) -> None:
        raise RuntimeError("EAGLE_KERNELS=aot but there is no library\nsecond line")

    monkeypatch.setattr(gpu.loader, "load", fails)
    assert Gpu.current().missing_library == "EAGLE_KERNELS=aot but there is no library"


@pytest.mark.parametrize(
    ("environment", "device", "cache", "wanted"),
    [
        ({}, "cuda", torch.bfloat16, None),
        ({"SGLANG_USE_HND_KVCACHE": "1"}, "cuda", torch.bfloat16, "SGLANG_USE_HND_KVCACHE: only KV caches in token-ma"),
        ({"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}, "cuda", torch.bfloat16, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ({"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}, "cpu", torch.bfloat16, None),
        ({}, "cuda", torch.float8_e4m3fn, None),
        ({}, "cuda", torch.float8_e5m2, None),
        ({}, "cpu", torch.float8_e4m3fn, "KV cache of float8_e4m3fn: on a CPU only KV caches in the model's own dtype"),
        ({}, "cuda", torch.float16, "KV cache of float16: only KV caches in the model's own dtype, bfloat16, or 8-bit"),
    ],
)
def test_which_caches_are_read(
    environment: dict[str, str], device: str, cache: torch.dtype, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    reasons = unsupported_cache(SimpleNamespace(device=device, kv_cache_dtype=cache, dtype=torch.bfloat16))
    assert len(reasons) == (wanted is not None)
    assert wanted is None or reasons[0].startswith(wanted)


@pytest.mark.parametrize(("dtype", "refused"), [(torch.bfloat16, False), (torch.float16, True)])
def test_a_head_has_the_models_own_dtype_by_any_of_its_names(dtype: torch.dtype, refused: bool) -> None:
    runner = SimpleNamespace(device="cpu", kv_cache_dtype=dtype, dtype=dtype)
    assert unsupported_cache(runner, "auto") == []
    for name in ("bf16", "bfloat16"):
        assert [name in reason for reason in unsupported_cache(runner, name)] == [True] * refused
