"""The CUDA kernels and their launchers, as they are in csrc/cuda, on the CPU: the kernel tests, and a race detector."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tvm_ffi
from cuda_emulation import CSRC, build_driver, build_emulated
from kernel_cases import random_parents

from eagle_plugin.core.penalties import Penalties
from eagle_plugin.core.round_start import RoundStart
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import new_table
from eagle_plugin.kernels import kv, loader, penalties, round_start, sampling, tree

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]

# order in which the threads of a block take turns; threads of a block, empty for the launcher's own number
RUNS = [("forward", ""), ("reverse", "64"), ("random", "32")]
CASES = [*(pytest.param(*run, marks=pytest.mark.matrix) for run in RUNS[:2]), RUNS[2]]
KERNEL_TESTS = [
    f"test_{name}_kernels.py" for name in ("tree", "kv", "accepted_path", "penalties", "round_start", "lookup")
]  # sampling: see below
# the barrier of which the negative controls are deprived
BARRIER = """    scratch.picked[place] = candidate;
  }
  team.sync();
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the race driver, built with ThreadSanitizer."""
    return build_driver(CSRC, tmp_path_factory.mktemp("races"))


@pytest.fixture(scope="module")
def without_a_barrier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of csrc in which select_tree lacks the barrier after its nodes were put in order."""
    csrc = tmp_path_factory.mktemp("racy") / "csrc"
    shutil.copytree(CSRC, csrc)
    header = csrc / "include" / "eagle" / "tree.h"
    text = header.read_text()
    assert BARRIER in text
    header.write_text(text.replace(BARRIER, BARRIER.replace("team.sync();", ";")))
    return csrc


def run_kernel_tests(library: Path, order: str, block: str, *selection: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "EAGLE_LIBRARY": str(library),
        "EAGLE_KERNELS": "",
        "EAGLE_EMULATION_ORDER": order,
        "EAGLE_EMULATION_BLOCK": block,
        "EAGLE_TEST_EXAMPLES": "12",
        "OMP_NUM_THREADS": "1",
    }
    tests = [str(Path(__file__).with_name(name)) for name in KERNEL_TESTS]
    # what the CPU refuses for its values a launcher cannot: to look at them it would wait for the device
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not values", *selection, *tests]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("order", "block"), CASES)
def test_the_kernel_tests_pass(emulated: Path, order: str, block: str) -> None:
    done = run_kernel_tests(emulated, order, block)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_missing_barrier_is_caught(emulated: Path, without_a_barrier: Path, tmp_path: Path) -> None:
    """Negative control: the same tests on kernels of which one lacks a barrier."""
    library = build_emulated(without_a_barrier, tmp_path, only="tree", others=emulated.parent)
    for order, block in RUNS:
        done = run_kernel_tests(library, order, block, "-x")
        if "FAILED" in done.stdout:
            assert "test_levels_and_selection" in done.stdout
            return
    pytest.fail("the barrier's absence was not noticed")


def detect_races(driver: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"EAGLE_EMULATION_BLOCK": "64"}
    return subprocess.run([str(driver)], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.matrix
def test_no_races(driver: Path) -> None:
    done = detect_races(driver)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr[:5000]


@pytest.mark.matrix
def test_a_planted_race_is_named(driver: Path, without_a_barrier: Path, tmp_path: Path) -> None:
    """Negative control: the detector names the function that lacks a barrier and the kernel that calls it."""
    report = detect_races(build_driver(without_a_barrier, tmp_path, only="tree", others=driver.parent)).stderr
    assert "data race" in report
    assert "eagle::select_tree<eagle::BlockTeam>" in report
    assert "cuda/tree.cu" in report


def use(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """Let the kernels' Python functions call this library."""
    module = tvm_ffi.load_module(str(library))
    for caller in (kv, penalties, round_start, tree):
        monkeypatch.setattr(caller, "function", lambda name, *_: module.get_function(name))


def test_a_corrupt_table_yields_the_root_alone(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU refuses a device cannot: the tree is then safe, and other requests keep theirs."""
    use(monkeypatch, emulated)
    table = new_table(2, 4)
    logp, tokens = -torch.arange(4.0).expand(2, 1, 4).contiguous(), torch.arange(8).view(2, 1, 4)
    tree.grow_level(table, 0, 1, logp, tokens, None, 0)
    roots = torch.tensor([90, 91])
    sound = tree.select_tree(table, roots, 4)
    assert sound.parents.tolist() == [[-1, 0, 0, 0]] * 2
    for parent in (3, 2, 1000000, 2**31 - 1):  # after the child, itself not kept, far outside
        table.parents[0, 2] = parent
        found = tree.select_tree(table, roots, 4)
        assert found.parents.tolist() == [[-1] * 4, [-1, 0, 0, 0]]
        assert found.tokens.tolist() == [[90] * 4, [91, 4, 5, 6]]
        assert found.depths.tolist() == [[0] * 4, [0, 1, 1, 1]]
        assert found.ancestors.tolist() == [[1, 3, 5, 9]] * 2


def test_wrong_moves_stop(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, emulated)
    before = torch.arange(8.0).repeat_interleave(4).view(8, 1, 4)
    window = torch.tensor([[1, 3, 5, 7]])
    good, bad_slot = [1, 2, 3], torch.tensor([[1, 3, 8, 7]])
    cases = [
        (good, window, 3, {1: 3, 3: 5, 5: 7}),
        (good, window, 4, {1: 3, 3: 5, 5: 7}),  # longer than the index
        (good, window, -1, {}),
        ([1, 4, 3], window, 3, {1: 3}),  # outside the window
        ([1, -1, 3], window, 3, {1: 3}),
        ([2, 1, 3], window, 3, {1: 5}),  # not ascending
        (good, bad_slot, 3, {1: 3}),
    ]
    for index, slots, length, moved in cases:
        cache = before.clone()
        ptrs, row = torch.tensor([cache.data_ptr()]), torch.tensor([16])
        path = torch.tensor([index], dtype=torch.int32)
        kv.compact_kv(ptrs, row, slots, path, torch.tensor([length], dtype=torch.int32), slots=8)
        assert cache[:, 0, 0].tolist() == [moved.get(slot, slot) for slot in range(8)], (index, slots, length)
    cache = before.clone()
    kv.store_kv(cache, cache, torch.tensor([8, 2, -1]), -before[:3] - 1, -before[:3] - 1)
    assert cache[:, 0, 0].tolist() == [0, 1, -2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("dim", [16, 3])
def test_keys_and_values_side_by_side(
    emulated: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int
) -> None:
    """The caches of one tensor [slots, heads, 2 * dim], as vLLM allocates them."""
    use(monkeypatch, emulated)
    both = torch.zeros(9, 5, 2 * dim, dtype=dtype)
    k, v = (torch.arange(3 * 5 * dim).view(3, 5, dim).to(dtype) + shift for shift in (1, 7))
    loc = torch.tensor([4, 0, 7])
    wanted = both.clone()
    wanted[loc] = torch.cat([k, v], dim=-1)
    kv.store_kv(*both.split(dim, dim=-1), loc, k, v)
    assert torch.equal(both, wanted)


def test_wrong_rows_and_tokens_change_nothing(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU refuses for its values: other requests are served, and nothing else is written."""
    use(monkeypatch, emulated)
    tables = Penalties(
        torch.ones(2, 5, dtype=torch.int32),
        torch.zeros(2),
        *(torch.ones(2) for _ in range(2)),
        torch.tensor([[4], [4]]),
        torch.tensor([9, 9]),
    )
    one, zero = torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int32)
    logits, lengths = torch.zeros(3, 5), torch.tensor([8, 8, 8])
    penalties.penalize_nodes(logits, one, one, zero, torch.tensor([-1, 1, 2]), lengths, tables)
    assert logits.tolist() == [[0.0] * 5, [-1.0] * 4 + [-torch.inf], [0.0] * 5]

    counts, tokens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([[0, 1], [3, 1], [-1, 2], [2, 2], [0, 0]])
    many = torch.tensor([2, 2, 2, 9, -1], dtype=torch.int32)
    penalties.count_tokens(counts, torch.tensor([2, 0, 1, 1, 0]), tokens, many)
    assert counts.tolist() == [[0, 1, 0], [0, 0, 3]]

    out = RoundStart.empty(3, 2, 4)
    out.table.fill_(-1)
    three = SamplingParams.of(3, 0.5, top_k=9, top_p=0.5, min_p=0.5)
    req_to_token, keys = torch.arange(1, 9, dtype=torch.int32).view(2, 4), torch.tensor([5, 6])
    round_start.start_round(out, torch.tensor([1, 1, -3]), torch.tensor([2, 1, 0]), req_to_token, keys, three)
    assert out.requests.tolist() == [0, 1, 0]
    assert out.prefix_lens.tolist() == [1, 1, 1]
    assert out.rng_keys.tolist() == [0, 6, 0]
    assert out.slots.tolist() == [[0, 0], [6, 7], [0, 0]]
    assert out.table.tolist() == [[0, 0, 0, -1], [5, 6, 7, -1], [0, 0, 0, -1]]
    assert out.sampling.top_ks.tolist() == [1, 9, 1]


def test_a_library_is_tried_before_it_serves(emulated: Path) -> None:
    loader.probe(tvm_ffi.load_module(str(emulated)), "cpu")


@pytest.mark.parametrize(("order", "block"), CASES)
def test_sampling_equals_the_cpus(emulated: Path, monkeypatch: pytest.MonkeyPatch, order: str, block: str) -> None:
    """Random numbers, proposals and walks bit for bit, whatever the size of the block.

    The tests of sampling draw too often for emulated threads; they hold for the CPU's kernels, hence for these.
    """
    monkeypatch.setenv("EAGLE_EMULATION_ORDER", order)
    monkeypatch.setenv("EAGLE_EMULATION_BLOCK", block)
    module = tvm_ffi.load_module(str(emulated))
    for seed in range(24) if block else (1, 4):  # 1024 emulated threads are slow
        for name, inputs, outputs in sampling_calls(seed):
            native = loader.function(name)
            assert native is not None
            wanted = [out.clone() for out in outputs]
            native(*inputs, *wanted)
            module.get_function(name)(*inputs, *outputs)
            assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True)), (name, seed)


def sampling_calls(seed: int) -> Iterator[tuple[str, tuple[object, ...], list[torch.Tensor]]]:
    """Yield the kernel, its inputs and its uninitialised outputs of one round for a few requests."""
    gen = torch.Generator().manual_seed(seed)

    def pick(*choices: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(choices, dtype=dtype)[torch.randint(0, len(choices), (b,), generator=gen)]

    b, width, k, top_m, max_accept_length, vocabulary = 3, 8, 3, 16, 4, (50, 700, 5000)[seed % 3]
    top_ks = pick(1, 5, 300, 2**30, 2**30, dtype=torch.int32)
    params = [pick(0.3, 1, 2, 50), top_ks, pick(0.5, 0.9, 0.9999, 1), pick(0, 0, 0.1)]
    keys, counters = torch.randint(-(2**62), 2**62, (2, b), generator=gen)
    yield "uniforms", (keys, counters, 5), [torch.empty(b, 11, dtype=torch.float64)]

    logits = torch.randn(b, vocabulary, generator=gen).mul(3).round()  # full of ties
    logp, index = tree.topk_log_softmax(logits, top_m)
    children: list[torch.Tensor] = [torch.empty(b, k), torch.empty(b, k, dtype=torch.int64)]
    yield "propose", (logp, index, params, keys, counters, None, 1.2), children

    parents = random_parents(b, width, gen)
    tokens = children[1].repeat(1, width)[:, :width].contiguous()
    rows = logits.repeat_interleave(width, 0) + torch.randn(b * width, vocabulary, generator=gen) / 4
    target = torch.cat([rows, rows[:, : seed % 5]], dim=1)[:, :vocabulary]  # rows of any alignment
    spoil(target, seed // 4 % 6, gen)
    accepted = [
        torch.empty(b, max_accept_length, dtype=torch.int32),
        torch.empty(b, dtype=torch.int32),
        torch.empty(b, max_accept_length, dtype=torch.int64),
    ]
    workspace = torch.empty(b * width, sampling.WORKSPACE_SIZE, dtype=torch.int64)
    yield "verify_tree", (tokens, parents, target, params, keys, counters, seed % 2 == 1, workspace), accepted


def spoil(logits: torch.Tensor, kind: int, gen: torch.Generator) -> None:
    """Make rows of logits as few are; kind 0 and 1 leave them as they were."""
    some = torch.rand(logits.shape, generator=gen)
    if kind == 2:
        logits.round_()  # ties at every cut
    if kind == 3:
        logits[some < 0.98] = -torch.inf  # a grammar allows few tokens
    if kind == 4:
        logits[some < 0.3] = torch.nan
        logits[some > 0.999] = torch.inf
    if kind == 5:
        logits[::2] = 0.5  # all equal, so that any list of the best overflows
        logits[1::4] = -torch.inf
