"""The benchmarks of single kernels run, or refuse cleanly; what they measure is asserted nowhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_under_test", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cpu_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "kernels.json"
    options = ["--contexts", "40", "--nodes", "1", "64", "--dtype", "float32", "--seconds", "0", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *options])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # the other tests keep theirs
    module = load(BENCHMARKS / "kernels.py")
    monkeypatch.setitem(module.SHAPES, "smollm2-135m", (9, 3, 64, 512))
    module.main()
    found = json.loads(report.read_text())
    kernels = [
        "tree_attention",
        "grow_level",
        "select_tree",
        "verify_greedy",
        "topk_log_softmax",
        "compact_kv",
        "store_kv",
        "verify_tree",
        "propose",
    ]
    assert list(dict.fromkeys(row["kernel"] for row in found["rows"])) == kernels
    assert {row["case"] for row in found["rows"][:2]} == {"context 40, 1 nodes", "context 40, 64 nodes"}
    assert all(row[name] > 0 for row in found["rows"] for name in ("ours_us", "floor_us", "other_us"))
    assert f"{found['date']}, {found['cpu']}, 1 thread" in capsys.readouterr().out


def test_gpu_kernels_refuse_without_a_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu" / "kernels.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: torch finds no CUDA device, wanted one: run this on a machine with")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_links_of_the_engines_form_of_a_tree() -> None:
    #     0        and a tree of padding alone
    #   1   2
    #  3 4   5
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1] * 6], dtype=torch.int32)
    children, siblings = load(BENCHMARKS / "gpu" / "kernels.py").first_links(parents)
    assert children.tolist() == [[1, 3, 5, -1, -1, -1], [-1] * 6]
    assert siblings.tolist() == [[-1, 2, -1, 4, -1, -1], [-1] * 6]
