"""The benchmarks of single kernels: they time what they say, refuse wrong kernels, or refuse cleanly to run.

How fast the kernels are is asserted nowhere.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_plugin.kernels import bf16_linear
from eagle_plugin.kernels.attention import tree_attention

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
    timed = []

    def twice(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
        """Run both calls, and say that the first took 3 us and the second 12 us."""
        timed.append([call() for call in calls])
        return [3e-6, 12e-6][: len(calls)]

    monkeypatch.setattr(module, "shortest", twice)
    monkeypatch.setattr(module, "copy_seconds", lambda size: 1e-9 * size)
    monkeypatch.setattr(module, "product_rate", lambda dtype: 1e9)
    module.main()
    found = json.loads(report.read_text())
    kernels = [
        "tree_attention",
        "int8_linear",
        *(["bf16_linear"] if bf16_linear.native_kernel() else []),
        "grow_level",
        "select_tree",
        "topk_log_softmax",
        "compact_kv",
        "store_kv",
        "verify_tree",
        "propose",
    ]
    assert list(dict.fromkeys(row["kernel"] for row in found["rows"])) == kernels
    assert {row["case"] for row in found["rows"][:2]} == {"context 40, 1 nodes", "context 40, 64 nodes"}
    assert len(timed) == len(found["rows"])
    assert [(row["ours_us"], row["other_us"]) for row in found["rows"]] == [pytest.approx((3, 12))] * len(timed)
    # Of float32 rows 9 and 3 heads of 64 wide: 64 nodes multiply more than a copy of their bytes takes, at these rates.
    one, many = found["rows"][:2]
    assert many["floor_us"] == pytest.approx(1e6 * 4 * 64 * 9 * (40 + 64) * 64 / 1e9)
    assert one["floor_us"] == pytest.approx(1e6 * max(4 * 9 * 41 * 64 / 1e9, (41 * 3 + 9) * 64 * 4 * 1e-9))
    shown = capsys.readouterr().out
    assert f"{found['date']}, {found['cpu']}, 1 thread" in shown and "4.0x" in shown


def test_the_shortest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the calls themselves move: a neighbour that disturbs two runs of three changes nothing."""
    module = load(BENCHMARKS / "kernels.py")
    now, runs = [0.0], [0]

    def call(seconds: float) -> Callable[[], None]:
        def run() -> None:
            runs[0] += 1
            now[0] += seconds * (1 if runs[0] % 5 == 0 else 3)

        return run

    clock = SimpleNamespace(thread_time=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(module, "time", clock)
    assert module.shortest([call(0.002), call(0.007)], 1.0) == pytest.approx([0.002, 0.007])


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(BENCHMARKS / "kernel_rows.py")
    setting = module.Setting(9, 3, 64, 512, torch.float32, [40], [8])
    monkeypatch.setattr(module, "tree_attention", lambda q, *rest, **options: torch.zeros_like(q))
    with pytest.raises(AssertionError, match="not close"):
        list(module.attention_rows(setting))


def test_gpu_kernels_refuse_without_a_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu/kernels.py")]
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


def attend_pages(q, k_cache, v_cache, *, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, causal, **rest):
    """What `flash_attn_with_kvcache` of FlashAttention 3 computes, over pages of one slot: the result, and the
    logarithms of the denominators by head and row."""
    assert not causal and rest["return_softmax_lse"]
    assert rest["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    group = q.shape[1] // k_cache.shape[2]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        slots = page_table[i, : cache_seqlens[i]].long()
        k, v = (cache[slots, 0].repeat_interleave(group, 1) for cache in (k_cache, v_cache))
        logits = softmax_scale * torch.einsum("qhd,khd->hqk", q[start:end], k)
        lse[:, start:end] = logits.logsumexp(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    return out, lse, None


def test_flash_attention_in_two_calls_is_tree_attention() -> None:
    backends = load(BENCHMARKS / "gpu" / "attention_backends.py")
    gen = torch.Generator().manual_seed(2)
    b, nodes, context = 2, 5, 7
    q = torch.randn(b * nodes, 4, 16, generator=gen)
    k, v = torch.randn(2, b * (context + nodes), 2, 16, generator=gen)
    table = torch.randperm(b * (context + nodes), generator=gen).int().view(b, -1)
    ancestors = torch.tensor([[1, 3, 5, 11, 21], [1, 3, 7, 15, 31]])
    found = backends.flash_attention(attend_pages, q, k, v, table, ancestors)()
    rest = (torch.arange(b), torch.full((b,), context))
    wanted = tree_attention(q, k, v, table, *rest, ancestors, tail=nodes, scale=16**-0.5)
    torch.testing.assert_close(found, wanted)
    ancestors[1, 3] = 9  # negative control: another tree
    assert not torch.allclose(backends.flash_attention(attend_pages, q, k, v, table, ancestors)(), wanted, atol=1e-3)


def test_vllms_flash_attention_takes_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither SGLang's nor the library's own is installed."""
    backends = load(BENCHMARKS / "gpu" / "attention_backends.py")
    asked: dict[str, Any] = {}

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> str:
        asked.update(given)
        return "out, lse"

    vllms = SimpleNamespace(FA3_AVAILABLE=True, flash_attn_varlen_func=varlen)

    def find(name: str) -> Any:
        if name != "vllm.vllm_flash_attn":
            raise ImportError(name)
        return vllms

    monkeypatch.setattr(backends.importlib, "import_module", find)
    table, q = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(1)
    given = {"page_table": table, "cache_seqlens": q, "max_seqlen_q": 3, "cu_seqlens_q": q, "causal": False}
    assert backends.flash_attention_3()(q, q, q, **given) == "out, lse"
    assert asked.pop("block_table") is table and asked.pop("seqused_k") is q and asked.pop("cu_seqlens_q") is q
    assert asked == {"max_seqlen_q": 3, "causal": False, "max_seqlen_k": 7, "fa_version": 3}
    vllms.FA3_AVAILABLE = False
    assert backends.flash_attention_3() is None


def test_the_fastest_library_of_each_case() -> None:
    choices = load(BENCHMARKS / "gpu" / "attention_backends.py").choices
    shape = {"batch": 1, "context": 2048, "nodes": 64}
    rows = [
        {"kernel": "tree_attention", "us": {"ours": 30.0, "FlashInfer": 20.0}, "shape": shape},
        {"kernel": "select_tree", "us": {"ours": 5.0}},
    ]
    assert choices(rows) == [{**shape, "fastest": "FlashInfer", "ours_over_fastest": 1.5}]
