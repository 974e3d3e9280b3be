"""The launches of verify_tree on a GPU, emulated, on rows of logits of every kind; trees: test_cuda_emulation.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import tvm_ffi
from covering import half
from cuda_emulation import CSRC, build_emulated
from torch import Tensor

from eagle_plugin.core.sampling import Filters, SamplingParams, target_distribution
from eagle_plugin.kernels import loader, sampling

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]

VOCABULARY = 5003  # more than a list holds, and rows of any alignment
LIST_SIZE = 4096  # csrc: kListSize
TOTALS = 3 + 32  # words of a workspace before RowWork::totals
OFF = 2**30
FILTERS = [  # top-k, top-p, min-p
    (OFF, 0.9, 0.0),
    (OFF, 0.5, 0.01),
    (OFF, 0.9999, 0.0),
    (40, 1.0, 0.0),
    (300, 0.9, 0.05),
    (2000, 0.7, 0.0),
    (OFF, 1.0, 0.1),
    (1, 0.9, 0.0),
]
# multiprocessors, which decide into how many parts a row is divided (1, 2 and 4); order and number of threads
RUNS = [("1", "forward", "32"), ("12", "reverse", "64"), ("132", "random", "96")]


def rows(kind: str, gen: torch.Generator) -> Tensor:
    normal = torch.randn(len(FILTERS), VOCABULARY, generator=gen)
    some = torch.rand(normal.shape, generator=gen)
    kinds = {
        "flat": normal,
        "peaked": 6 * normal,
        "of bfloat16": normal.bfloat16().float(),
        "tied": (3 * normal).round(),
        "nearly equal": 1e-6 * normal,
        "equal": torch.full_like(normal, -2.5),
        "two values": (some < 0.5).float(),
        "masked": torch.where(some < 0.98, -torch.inf, normal),
        "impossible": torch.full_like(normal, -torch.inf),
        "broken": torch.where(some < 0.3, torch.nan, torch.where(some > 0.999, torch.inf, normal)),
    }
    return kinds[kind]


KINDS = ["flat", "peaked", "of bfloat16", "tied", "nearly equal", "equal", "two values", "masked", "impossible"]
KINDS += ["broken"]


class Statistics(NamedTuple):
    """RowWork of csrc/include/eagle/row_statistics.h: what a draw reads, and how the row was done."""

    cut_value: Tensor
    cut_index: Tensor
    min_weight: Tensor
    length: Tensor  # of the list
    total: Tensor  # the weight of the first part, if the row was read for weights

    @classmethod
    def of(cls, workspace: Tensor) -> Statistics:
        floats, ints = workspace.view(torch.float32), workspace.view(torch.int32)
        return cls(floats[:, 1], ints[:, 2], workspace[:, 2], workspace[:, -1 - LIST_SIZE], workspace[:, TOTALS])


def call(native, logits: Tensor, params: SamplingParams, keys: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Draw one token per row by these keys; the tokens and the workspace."""
    b = len(logits)
    one, none = torch.ones(b, 1, dtype=torch.int64), torch.full((b, 1), -1, dtype=torch.int32)
    workspace = torch.full((b, sampling.WORKSPACE_SIZE), -1, dtype=torch.int64)
    out = torch.empty(b, 1, dtype=torch.int32), torch.empty(b, dtype=torch.int32), torch.empty_like(one)
    native(one, none, logits, params, keys, torch.arange(b), filters == "chained", workspace, *out)
    return out[2][:, 0], workspace


def kept(logits: Tensor, params: SamplingParams, found: Statistics) -> Tensor:
    """Which tokens the statistics keep; weights as in csrc/include/eagle/weights.h, up to rounding."""
    x = torch.where(logits.isnan(), -torch.inf, logits)
    highest = x.amax(1, keepdim=True)
    weights = torch.where(x == highest, 0.0, (x - highest).double() / params.temperatures[:, None]).exp() * 2**40
    cut, ids = found.cut_value[:, None], torch.arange(x.shape[1])
    return ((x > cut) | ((x == cut) & (ids <= found.cut_index[:, None]))) & (weights >= found.min_weight[:, None])


def compare(module, kind: str, filters: Filters) -> Statistics:
    """Fail unless tokens are those of the CPU's kernel, and what is kept is what the oracle keeps."""
    gen = torch.Generator().manual_seed(len(kind))
    logits = rows(kind, gen)
    top_ks, top_ps, min_ps = (torch.tensor(x) for x in zip(*FILTERS, strict=True))
    params = SamplingParams.of(len(FILTERS), 0.8)._replace(top_ks=top_ks.int(), top_ps=top_ps, min_ps=min_ps)
    keys = torch.randint(2**62, (len(FILTERS),), generator=gen)
    native = loader.function("verify_tree")
    assert native is not None
    wanted, _ = call(native, logits, params, keys, filters)
    tokens, workspace = call(module.get_function("verify_tree"), logits, params, keys, filters)
    assert torch.equal(tokens, wanted)
    found = Statistics.of(workspace)
    sampled = top_ks > 1
    p = target_distribution(logits, params, filters)
    least = p.where(p > 0, 2.0).amin(1, keepdim=True)  # rounding may move a cut by one token, or by its equals
    off = SamplingParams.of(len(FILTERS), 0.8)
    possible = target_distribution(logits, off, filters) > 1e-11  # of lighter tokens the weight is rounded to 0
    differ = (kept(logits, params, found) != (p > 0)) & possible
    assert not bool((differ & (p > 1.01 * least)).any(1)[sampled].any())
    assert int(differ.sum(1)[sampled].max()) <= 1
    return found


@pytest.fixture(params=RUNS, ids=" ".join)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("PROCESSORS", "ORDER", "BLOCK"), request.param, strict=True):
        monkeypatch.setenv(f"EAGLE_EMULATION_{name}", value)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("run", "filters", "kind"), half(RUNS, ("joint", "chained"), KINDS), indirect=["run"])
def test_every_kind_of_row(emulated: Path, kind: str, filters: Filters) -> None:
    found = compare(tvm_ffi.load_module(str(emulated)), kind, filters)
    in_list = found.length[:3]  # top-p alone
    if kind in ("equal", "nearly equal", "impossible"):
        assert bool((in_list > LIST_SIZE).all())  # the row is read again
    elif kind != "two values":
        assert bool((in_list[:2] > 0).all() and (in_list[:2] < 1000).all())  # few tokens are compared


@pytest.mark.usefixtures("run")
def test_a_greedy_row_is_read_once(emulated: Path) -> None:
    """For its most likely token: no launch weighs it, and the workspace is as it was."""
    found = compare(tvm_ffi.load_module(str(emulated)), "flat", "joint")
    whole = [top_k == 1 or (top_k == OFF and top_p == 1.0) for top_k, top_p, _ in FILTERS]
    assert whole.count(True) == 2  # the other one is cut by min-p alone, in the draw
    assert (found.total == -1).tolist() == whole


@pytest.mark.matrix
def test_lost_tokens_are_caught(emulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: kernels that leave every third token out of the list."""
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    header = csrc / "include" / "eagle" / "row_statistics.h"
    text = header.read_text()
    assert "if (weight < least) return;" in text
    header.write_text(text.replace("if (weight < least) return;", "if (weight < least || token % 3 == 0) return;"))
    module = tvm_ffi.load_module(str(build_emulated(csrc, tmp_path, only="sampling", others=emulated.parent)))
    monkeypatch.setenv("EAGLE_EMULATION_BLOCK", "32")
    with pytest.raises(AssertionError):
        compare(module, "flat", "joint")
