"""A device that is not there is one sentence, before anything is loaded."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch
from quantised_models import quantise
from tiny_targets import write_target

from eagle_plugin import cli
from eagle_plugin.common import devices
from eagle_plugin.common.device_memory import device_for, loaded_bytes
from eagle_plugin.common.devices import DeviceError, check_device, fast_dtype
from eagle_plugin.learning.data.store.features import load_target
from eagle_plugin.learning.train.recipe import parse_recipe


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"^--device {name} cannot be used \([^\n]+\); give [^\n]+$"):
        check_device(name)
    assert check_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["data features rows --target t --store s", "eval t head"])
def test_cuda_without_a_gpu(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([*command.split(), "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("error: --device cuda cannot be used (")


@pytest.mark.parametrize(("free", "device"), [(2**30, "cpu"), (2**31, "cuda"), (None, "cpu")])
def test_a_gpu_without_room_for_the_weights_is_left(free, device, tmp_path, monkeypatch, capsys) -> None:
    """Another program may hold its memory; then not even the free memory can be asked for."""

    def info() -> tuple[int, int]:
        if free is None:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return free, 2**40

    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**30)  # no bytes on the disk
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    assert device_for([tmp_path]) == device
    printed = capsys.readouterr().err
    assert printed.count("computing on the CPU: ") == (device == "cpu") and ("need 1.2 GiB" in printed) == bool(printed)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_mxfp4_counts_as_what_it_becomes(has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its kernels transformers makes bfloat16 of it, four times the bytes."""
    plain = write_target(tmp_path / "plain", "gpt_oss", intermediate_size=64)
    target = quantise(tmp_path / "mxfp4", plain, "mxfp4")
    model = load_target(plain, torch.bfloat16)
    experts = sum(x.numel() for name, x in model.named_parameters() if name.endswith(("up_proj", "down_proj")))
    file = (target / "model.safetensors").stat().st_size
    unpacked = file + 2 * experts - experts * 17 // 32  # stored: 4 bits per number, and 8 per 32 of them
    for name in ("accelerate", "kernels", "triton"):
        monkeypatch.setattr(f"transformers.utils.is_{name}_available", lambda *version: has_kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert loaded_bytes(target) == (file if has_kernels else unpacked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(1.2 * unpacked) - 1, 2**40))
    assert device_for([target]) == ("cuda" if has_kernels else "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(1.2 * unpacked) + 1, 2**40))
    assert device_for([target]) == "cuda"


def test_a_head_that_is_not_there(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(tiny_target), "nosuch"]) == 2
    assert "error: nosuch is not a folder; give the folder that holds config.json" in capsys.readouterr().err


def test_processors_with_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that were measured on one do not hold for the other."""
    found = []
    for model in (1, 17):
        cpuinfo = tmp_path / f"cpuinfo{model}"
        cpuinfo.write_text(f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n" * 2)
        monkeypatch.setattr(devices, "_CPUINFO", cpuinfo)
        found.append(devices._processor.__wrapped__())
    assert found == ["AMD EPYC 25 1", "AMD EPYC 25 17"]
    cpuinfo.write_text("processor: 0\n")
    assert devices._processor.__wrapped__() == platform.processor()


class Driver:
    """Stands in for libcuda."""

    def __init__(self, failure: int) -> None:
        self._failure = failure

    def cuDriverGetVersion(self, version: object) -> int:  # noqa: N802
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = 13000
        return self._failure


def test_the_version_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may hide the file of the driver; a start must not fail for that."""
    file = tmp_path / "version"
    file.write_text("NVRM version: 580.159.04\nGCC\n")
    monkeypatch.setattr(devices, "_DRIVER", file)
    assert devices.driver_version() == "NVRM version: 580.159.04"
    file.unlink()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(failure=0))
    assert devices.driver_version() == "CUDA 13000"
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(failure=35))
    assert devices.driver_version() == "unknown"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert devices.driver_version() == "unknown"


@pytest.mark.parametrize(("has_products", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_of_a_cpu(has_products: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, features and evaluation take it unless a dtype is given."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_products)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fast_dtype() == fast_dtype("cpu") == dtype
    assert fast_dtype("cuda") == "bfloat16"
    values = {"target": "t", "data": {"store": "s"}, "budget": {"epochs": 1}}
    assert parse_recipe(values, "recipe").dtype == dtype
    assert parse_recipe(values | {"device": "cuda"}, "recipe").dtype == "bfloat16"
    for given in ("bfloat16", "float32"):
        assert parse_recipe(values | {"dtype": given}, "recipe").dtype == given
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fast_dtype() == parse_recipe(values, "recipe").dtype == "bfloat16"
