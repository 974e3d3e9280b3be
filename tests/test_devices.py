"""A device that is not there is one sentence, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_plugin import cli
from eagle_plugin.devices import DeviceError, check_device


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


def test_a_head_that_is_not_there(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(tiny_target), "nosuch"]) == 2
    assert "error: nosuch is not a folder; give the folder that holds config.json" in capsys.readouterr().err
