"""docs/upstream.md: every fault has a section, a command and source lines; the installed engines still have them.

upstream/: every patch applies to the installed engines, and its test fails without it and passes with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import upstream_patches
from upstream_faults import BY_NAME, ENGINES, FAULTS, Fault, Line, drift, site_packages

from eagle_plugin.sglang.version import TESTED as SGLANG
from eagle_plugin.vllm.version import TESTED as VLLM
from upstream import interpreter

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs/upstream.md").read_text("utf-8")
# The releases in which the document's lines were read: SGLang's newest, and vLLM's with a CPU build.
VERSIONS = {"vllm": f"vLLM {VLLM[0]}", "sglang": f"SGLang {SGLANG[-1]}"}
SECONDS = 600  # of one reproduction on a busy machine; alone it takes less than a minute
faults = pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])

patches = pytest.mark.parametrize("name", upstream_patches.NAMES)


def sections(text: str) -> dict[str, str]:
    """The sections of a document by the name in code marks at the beginning of their headings."""
    parts = re.split(r"^### `([a-z0-9-]+)`", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts[1::2]), strict=True))


def mentioned(text: str) -> list[str]:
    """The source lines that a section names."""
    return re.findall(r"`((?:vllm|sglang)/[\w/]+\.py:\d+)`", text)


def test_the_document_has_every_fault_and_no_other() -> None:
    assert list(sections(DOCUMENT)) == [fault.name for fault in FAULTS]
    assert {fault.engine for fault in FAULTS} == set(ENGINES)
    assert sorted(set(re.findall(r"tests/support/upstream\.py ([a-z][a-z0-9-]+)", DOCUMENT)) - set(BY_NAME)) == []


@faults
def test_a_section_has_its_command_version_and_lines(fault: Fault) -> None:
    section = sections(DOCUMENT)[fault.name]
    assert fault.command in section
    assert VERSIONS[fault.engine] in section
    assert sorted(set(mentioned(section))) == sorted(line.place for line in fault.lines)
    for part in ("**What a user sees.**", "**Where.**", "**What the plugin does.**", "**Reported.**", "**Patch.**"):
        assert part in section


def test_a_section_says_what_its_patch_changes() -> None:
    assert set(upstream_patches.NAMES) < set(BY_NAME)
    for name, section in sections(DOCUMENT).items():
        text = " ".join(section.partition("**Patch.**")[2].split())
        if name not in upstream_patches.NAMES:
            assert text.startswith("None: ") and "--test" not in text
            continue
        files = upstream_patches.changed_files(name)
        added, removed = (sum(counts) for counts in zip(*files.values(), strict=True))
        files_text = f"{len(files)} file{'s' * (len(files) > 1)}"
        assert text.startswith(f"`upstream/{name}`: {files_text}, {added} lines added, {removed} removed. ")
        assert f"{BY_NAME[name].command} --test" in text


@pytest.mark.parametrize(
    ("name", "environment"),
    [(name, f".venv-{upstream_patches.engine_of(name)}") for name in upstream_patches.NAMES]
    + [(name, ".venv-vllm-next") for name in upstream_patches.NAMES if name.startswith("vllm")],
)
def test_a_patch_applies(name: str, environment: str, tmp_path: Path) -> None:
    """To the release of the document, and those for vLLM to the newest release too: it has the same faults."""
    packages = next(ROOT.glob(f"{environment}/lib/python*/site-packages"), None)
    if packages is None:
        pytest.skip(f"there is no {environment}; CONTRIBUTING.md says how to make it")
    upstream_patches.apply(name, packages, tmp_path / "patched")
    for file in upstream_patches.changed_files(name):
        patched = tmp_path / "patched" / file
        compile(patched.read_text("utf-8"), file, "exec")
        assert not patched.is_symlink() and patched.read_bytes() != (packages / file).read_bytes()
    untouched = [path for path in (tmp_path / "patched").rglob("*.py") if path.is_symlink()]
    assert untouched and all(path.samefile(packages / path.relative_to(tmp_path / "patched")) for path in untouched)


@faults
def test_the_engine_has_the_lines_that_the_document_names(fault: Fault) -> None:
    """Fails after a change of the engine's version: the message names what to look at again."""
    folder = site_packages(fault.engine)
    if folder is None:
        pytest.skip(f"{fault.engine} is not installed")
    assert [found for line in fault.lines if (found := drift(line, folder))] == []


def test_a_moved_line_and_a_lost_one_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("one\ntwo\n")
    line = Line("engine.py", 2, "two")
    assert drift(line, tmp_path) is None
    assert "it is in line 2;" in str(drift(line._replace(number=1), tmp_path))
    assert "it is gone;" in str(drift(line._replace(text="three"), tmp_path))
    assert "the file is gone;" in str(drift(line._replace(file="other.py"), tmp_path))


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/support/upstream.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


def test_the_list_names_every_fault_with_a_reproduction() -> None:
    listed = ask("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(BY_NAME)
    for fault in FAULTS:
        source = (ROOT / f"tests/support/upstream_{fault.engine}.py").read_text("utf-8")
        assert f'    "{fault.name}": ' in source


def test_wrong_names_are_refused() -> None:
    for arguments in ((), ("vllm-nothing",), ("vllm-sampler", "--test"), ("vllm-sampler", "--patched")):
        refused = ask(*arguments)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr


@pytest.mark.matrix
@pytest.mark.server
@faults
def test_the_fault_is_there(fault: Fault) -> None:
    if interpreter(fault.engine) is None:
        pytest.skip(f"{fault.engine} is not installed")
    shown = ask(fault.name)
    assert shown.returncode == 0, shown.stdout + shown.stderr[-2000:]
    assert f"{fault.name}: the fault is there" in shown.stdout


@pytest.mark.matrix
@patches
def test_only_the_patch_passes_its_test(name: str) -> None:
    if interpreter(upstream_patches.engine_of(name)) is None:
        pytest.skip(f"{name}: the engine is not installed")
    tried = ask(name, "--test")
    assert tried.returncode == 0, tried.stdout + tried.stderr[-2000:]
    assert "the test fails without the patch and passes with it" in tried.stdout


@pytest.mark.matrix
@pytest.mark.server
@pytest.mark.parametrize("name", ["vllm-min-tokens", "vllm-chunk-ends", "vllm-seed-chunks", "sglang-greedy-cpu"])
def test_the_patch_repairs_the_fault(name: str) -> None:
    if interpreter(upstream_patches.engine_of(name)) is None:
        pytest.skip(f"{name}: the engine is not installed")
    shown = ask(name, "--patched")
    assert shown.returncode == 1, shown.stdout + shown.stderr[-2000:]
    assert f"{name}: the fault is not there" in shown.stdout
