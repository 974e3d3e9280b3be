"""What documents say in several places agrees, and an install command says which machine it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from document_commands import ROOT, parts_of, tracked_documents

FOR_CPUS = re.compile(r"pip install .*(\./compat/sglang-cpu|dist/\*\.whl)")


def without_machine(text: str) -> list[str]:
    """Lines that install the kernels for CPUs, which replace those of a GPU, and do not say that they are for CPUs."""
    return [line for line in text.splitlines() if FOR_CPUS.search(line) and "CPU" not in line]


@pytest.mark.parametrize("name", [name for name in tracked_documents() if name != "CHANGELOG.md"])
def test_an_install_of_the_kernels_for_cpus_says_so(name: str) -> None:
    assert without_machine((ROOT / name).read_text("utf-8")) == []


def test_an_install_without_a_machine_is_found() -> None:
    assert without_machine("```\npip install . ./compat/sglang-cpu   # beside SGLang\n```\n")
    assert without_machine("| wheels | `pip install dist/*.whl` |\n")


def test_vllm_on_gpus_has_a_whole_command() -> None:
    """Build, switch and server in one block: without the switch vLLM's own worker serves."""
    blocks = [part.text for part in parts_of((ROOT / "docs/gpu.md").read_text("utf-8")) if part.language is not None]
    whole = [block for block in blocks if "EAGLE_PLUGIN=force vllm serve" in block]
    assert any("EAGLE_BUILD=cuda pip install" in block and "--tensor-parallel-size" in block for block in whole)


def rates(path: Path, row: str) -> list[str]:
    """The rates in the rows of a document that begin so, without quartiles."""
    lines = [line for line in path.read_text("utf-8").splitlines() if re.match(row, line)]
    return [rate for line in lines for rate in re.findall(r"(?<![\d.])\d+\.\d\b", re.sub(r"\[.*?\]", "", line))]


def test_the_gains_of_the_readme_are_those_of_the_measurements() -> None:
    shown = rates(ROOT / "README.md", r"\| (SGLang|vLLM), .* \| \d")
    assert len(shown) >= 12 and not set(shown) - {*rates(ROOT / "docs/performance.md", r"\| (tokens/s|against) ")}
