"""benchmarks/launches.py: what counts as a launch, whose it is, and what the clock leaves out.

The whole of benchmarks/host_time.py is run by tests/engines/sglang/test_launches.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks import host_engines, host_time
from benchmarks.launches import ENGINE, GRAPH, OTHER, OURS, CountLaunches, Probe
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels.tree import sibling_links


def counted(call: Callable[[], object], whose: str = OTHER) -> dict[str, int]:
    probe = Probe()
    probe.begin_round("one")
    with CountLaunches(probe):
        call()
    probe.end_round()
    return {launch.name: n for launch, n in probe.launches.items() if launch.whose == whose}


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda x: x + 1, {"add": 1}),
        (lambda x: x.view(4).expand(3, 4).transpose(0, 1), {}),
        (lambda x: torch.empty(3).new_empty(2), {}),
        (lambda x: x[:, 0].copy_(x[:, 1]), {"copy_": 1}),
        (lambda x: torch.nn.functional.pad(x, (0, 1)), {"constant_pad_nd": 2}),
        (lambda x: x.repeat_interleave(2), {"clone": 1}),
        (lambda x: torch.zeros(3), {"zeros": 1}),
    ],
    ids=["add", "views", "empty", "copy", "pad", "repeat", "zeros"],
)
def test_operations(call: Callable[[torch.Tensor], object], wanted: dict[str, int]) -> None:
    x = torch.ones(2, 2)
    found = counted(lambda: call(x))
    if "clone" in wanted:  # how torch writes it differs between versions; that it is one kernel does not
        assert sum(found.values()) == 1
    else:
        assert found == wanted


def test_whose_code_it_is() -> None:
    roots = torch.zeros(3, dtype=torch.int64)
    assert counted(lambda: DraftTree.padding(roots, 4), OURS)
    assert counted(lambda: DraftTree.padding(roots, 4), ENGINE) == {}
    engine: dict[str, Callable[[], torch.Tensor]] = {}
    code = "import torch\ndef call():\n    return torch.ones(2) * 2\n"
    exec(compile(code, "/somewhere/site-packages/sglang/srt/file.py", "exec"), engine)
    assert sum(counted(engine["call"], ENGINE).values()) == 2


def test_native_kernels_are_counted_and_run() -> None:
    probe = Probe()
    parents = torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)
    with probe.native_kernels():
        probe.begin_round("one")
        first_child, _ = sibling_links(parents)
        probe.end_round()
    assert first_child.tolist() == [[1, 3, -1, -1]]
    assert [(x.phase, x.whose, x.name) for x in probe.launches] == [("one", OURS, "native sibling_links")]
    sibling_links(parents)
    assert probe.launches.total() == 1


def test_phases_and_what_is_left_out() -> None:
    now = [0]  # nanoseconds, which only this test lets pass

    def wait(nanoseconds: int) -> None:
        now[0] += nanoseconds

    probe = Probe(lambda: now[0])
    probe.enter("before any round")
    wait(7)
    probe.begin_round("one")
    wait(2)
    with probe.left_out():
        probe.count("not counted", OURS)
        wait(20)
    probe.enter("two")
    wait(5)
    with probe.as_graph("draft"):
        probe.count("inside a graph", OURS)
        wait(20)
    probe.enter("one")
    wait(3)
    probe.end_round()
    wait(9)
    assert probe.phases == {"one": 5, "two": 5}
    assert [(launch.phase, number) for launch, number in probe.launches.items() if launch.whose == OURS] == [("two", 1)]
    assert [launch.name for launch in probe.launches] == [f"{GRAPH} draft"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--greedy", "33"], "wanted at least one batch, of 1 to 32 requests"),
        (["--greedy", "--sampled"], "wanted at least one batch, of 1 to 32 requests"),
        (["--rounds", "0"], "wanted at least one repeat, and 1 to 350 rounds of shape 3/4/16"),
        (["--rounds", "300", "--shape", "5/8/48"], "1 to 233 rounds of shape 5/8/48"),
        (["--shape", "3/x"], "'3/x' is not a tree shape"),
    ],
)
def test_wrong_options_of_host_time(
    options: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["host_time.py", *options])
    with pytest.raises(SystemExit, match="2"):
        host_time.main()
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [("sglang", "SGLang is not .*; run make env and"), ("vllm", "vLLM is not .*; run make env-vllm and")],
)
def test_host_time_without_the_engine(engine: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=wanted):
        host_time.measure(engine, Shape(3, 4, 16), [(1, 0.0)], 1, 1)
