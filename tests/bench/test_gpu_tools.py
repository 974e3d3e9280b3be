"""Steps of `make gpu` that run other programs: what they ask for, and what they make of the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch

from benchmarks.gpu import build, groups, kernel_tests, run, sanitizers, selftest, server, speed
from benchmarks.gpu.model_cases import ANY_KERNELS
from benchmarks.gpu.steps import Setting, StepError, StepSkipped
from eagle_plugin.kernels import loader

GPU, CPU = Setting("cuda", tiny=True), Setting("cpu", tiny=True)
Answer = Callable[[Sequence[str]], tuple[int, str, str]]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[list[str]]]:
    """Replaces the programs that steps start by a function; returns the commands that were given."""

    def install(answer: Answer) -> list[list[str]]:
        commands: list[list[str]] = []

        def start(command: Sequence[str], *more: Any) -> subprocess.CompletedProcess[str]:
            commands.append([str(part) for part in command])
            return subprocess.CompletedProcess(command, *answer(commands[-1]))

        for step in (kernel_tests, selftest, speed):
            monkeypatch.setattr(step, "run_shown", start)
        return commands

    return install


def junit(command: Sequence[str], cases: str) -> None:
    (option,) = [part for part in command if part.startswith("--junitxml=")]
    Path(option.partition("=")[2]).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")


def test_a_kernel_test_that_fails(programs: Callable[[Answer], list[list[str]]]) -> None:
    def answer(command: Sequence[str]) -> tuple[int, str, str]:
        junit(
            command,
            '<testcase name="one"/><testcase name="two"><failure message="1 is not 2&#10;more"/></testcase>',
        )
        return 1, "", ""

    commands = programs(answer)
    with pytest.raises(StepError, match=r"^1 of 2 tests fail on cuda, first two: 1 is not 2$"):
        kernel_tests.run(GPU)
    assert commands[0][:3] == [sys.executable, "-m", "pytest"]
    assert "tests/kernels/test_kv_kernels.py::test_compact_kv" in commands[0]


def test_kernel_tests_that_do_not_run(programs: Callable[[Answer], list[list[str]]]) -> None:
    programs(lambda command: (3, "", "Traceback\nINTERNALERROR"))
    with pytest.raises(StepError, match="pytest ended with 3 and no report: INTERNALERROR"):
        kernel_tests.run(GPU)

    def fewer(command: Sequence[str]) -> tuple[int, str, str]:
        junit(command, '<testcase name="one"/>')
        return 0, "", ""

    programs(fewer)
    with pytest.raises(StepError, match="after 1 tests, wanted 4 or more"):
        kernel_tests.run(GPU)


def test_kernel_tests_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_tests.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StepSkipped, match="pytest, pytest_timeout, hypothesis, scipy not installed: pip install"):
        kernel_tests.run(GPU)


def test_every_named_kernel_test_exists() -> None:
    for tests in (kernel_tests.TESTS, kernel_tests.TINY, sanitizers.TESTS):
        for file, names in tests.items():
            source = (kernel_tests.ROOT / f"tests/kernels/test_{file}_kernels.py").read_text()
            assert all(f"def {name}(" in source for name in names), file
    files = {
        path.stem[len("test_") : -len("_kernels")] for path in kernel_tests.ROOT.glob("tests/kernels/test_*_kernels.py")
    }
    assert files == kernel_tests.TESTS.keys(), "a new file is named in benchmarks/gpu/kernel_tests.py too"
    # Caches of 8-bit floats are read and written by functions of two modules.
    moved = {module.__name__.rpartition(".")[2] for module in on_device.MODULES}
    assert moved == kernel_tests.TESTS.keys() - {"float8"}, "a new module is named in tests/support/on_device.py too"


def test_sanitizers(monkeypatch: pytest.MonkeyPatch, programs: Callable[[Answer], list[list[str]]]) -> None:
    monkeypatch.setattr(sanitizers.shutil, "which", lambda name: f"/tools/{name}")

    def answer(command: Sequence[str]) -> tuple[int, str, str]:
        junit(command, '<testcase name="x"/>' * 4)
        return (0 if "memcheck" in command else sanitizers.FAULT), "", ""

    commands = programs(answer)
    with pytest.raises(StepError, match="pytest ended with 99 after 4 tests"):
        sanitizers.run(GPU)
    assert [command[:3] for command in commands] == [
        ["/tools/compute-sanitizer", "--tool", tool] for tool in ("memcheck", "racecheck")
    ]
    with pytest.raises(StepSkipped, match="compute-sanitizer checks CUDA kernels"):
        sanitizers.run(CPU)


def test_other_programs_that_fail(programs: Callable[[Answer], list[list[str]]]) -> None:
    programs(lambda command: (2, "", "a line\nerror: torch finds no CUDA device"))
    with pytest.raises(StepError, match=r"kernels.py ended with 2: error: torch finds no CUDA device"):
        speed.run(GPU)


@pytest.fixture
def every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(("engine", "report"), [("sglang", "demo.json"), ("vllm", "demo-vllm.json")])
def test_the_demo_on_a_gpu(every_module: None, monkeypatch: pytest.MonkeyPatch, engine: str, report: str) -> None:
    """vLLM serves with the plugin on a GPU only if it is forced."""
    asked, ended = [], 0

    def start(command: Sequence[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        asked.append((list(command), more))
        if not ended:
            (Path(command[command.index("--out") + 1]) / report).write_text('{"speedup_vs_plain": 1.5}')
        return subprocess.CompletedProcess(command, ended, "", "a line\nerror: torch finds no CUDA device")

    monkeypatch.setattr(server, "run_shown", start)
    setting = GPU._replace(engine=engine)
    assert server.run(setting) == {"speedup_vs_plain": 1.5}
    ((command, switch),) = asked
    assert command[3:8] == ["demo", "--engine", engine, "--device", "cuda"] and "--quick" in command
    assert switch == ({"EAGLE_PLUGIN": "force"} if engine == "vllm" else ANY_KERNELS)
    ended = 2
    with pytest.raises(StepError, match="the demo ended with 2: error: torch finds no CUDA device"):
        server.run(setting)


@pytest.mark.parametrize(("engine", "name"), [("sglang", "SGLang"), ("vllm", "vLLM")])
def test_a_server_without_its_engine(monkeypatch: pytest.MonkeyPatch, engine: str, name: str) -> None:
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    for step in (server, *([selftest] if engine == "vllm" else [])):
        with pytest.raises(StepSkipped, match=f"the module {engine} is not installed, wanted {name} and eagle-plugin"):
            step.run(GPU._replace(engine=engine))


def test_the_self_test_beside_vllm(every_module: None, programs: Callable[[Answer], list[list[str]]]) -> None:
    found = {"passed": True, "reasons": [], "checks": []}
    commands = programs(lambda command: (0, json.dumps(found), ""))
    assert selftest.run(GPU) == found
    assert commands[0][3:7] == ["selftest", "--json", "--device", "cuda"]
    failed = json.dumps(found | {"passed": False, "reasons": ["compact_kv: 3 of 9 values differ"]})
    programs(lambda command: (1, failed, "the self-test failed"))
    with pytest.raises(StepError, match="the self-test failed: compact_kv: 3 of 9 values differ"):
        selftest.run(GPU)
    programs(lambda command: (2, "", "a line\nerror: no CUDA device"))
    with pytest.raises(StepError, match="the self-test ended with 2: error: no CUDA device"):
        selftest.run(GPU)


def test_a_build_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(library: object) -> Path:
        raise RuntimeError("no nvcc found")

    monkeypatch.setattr(loader, "first_use_build", refuse)
    with pytest.raises(StepError, match="the cuda library cannot be built: no nvcc found"):
        build.run(GPU)


def test_machines_that_cannot_run_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        with pytest.raises(run.NoGpu, match="Tesla T4 has compute capability 7.5, wanted 8.0 or more; make gpu needs"):
            run.check_device("cuda")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(run.NoGpu, match="cannot import torch .*; make gpu needs .* GPU_PYTHON="):
        run.check_device("cuda")


def test_what_a_program_prints_is_in_the_log_before_it_ends() -> None:
    """A step that reaches its limit has what its program printed until then."""
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(30)"
    shows = f"from benchmarks.gpu import groups; groups.run_shown([{sys.executable!r}, '-c', {program!r}])"
    with groups.running([sys.executable, "-c", shows], {}, stdout=subprocess.PIPE) as step:
        assert step.stdout is not None
        os.kill(int(step.stdout.readline()), 0)  # raises if the program has ended
    done = groups.run_shown([sys.executable, "-c", "import sys; print(1); sys.exit('no')"])
    assert (done.returncode, done.stdout, done.stderr) == (1, "1\n", "no\n")
