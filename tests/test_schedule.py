"""The groups of `make test`: files that share servers stay in one worker, and the longest groups start first."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import schedule

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}


def test_the_tables_name_files_that_exist() -> None:
    environment = runpy.run_path(str(ROOT / "tests" / schedule.VLLM_ENVIRONMENT))
    processes = {f"test_group[{group}]" for group in environment["GROUPS"]}
    assert {*schedule.SHARED, *schedule.TOGETHER} <= FILES
    shared = {f"{name} {way}" for name in schedule.SHARED.values() for way in schedule.WAYS}
    assert set(schedule.SECONDS) <= FILES | shared | processes | set(schedule.TOGETHER.values())


def test_groups() -> None:
    assert schedule.group_of("tests/core/test_tree.py::test_a[x::y]") == "core/test_tree.py"
    seeds = "engines/sglang/test_seeds.py"
    assert schedule.group_of(f"tests/{seeds}::test_a[graphs]") == "sglang requests graphs"
    assert schedule.group_of(f"tests/{seeds}::test_a[synchronous-setting0]") == "sglang requests synchronous"
    assert schedule.group_of(f"tests/{seeds}::test_graphs[a]") == seeds  # asks none of the servers
    emulated = {schedule.group_of(f"tests/{file}::test_a") for file in schedule.TOGETHER}
    assert emulated == {"cuda emulation"}
    assert schedule.group_of("tests/test_vllm_environment.py::test_group[greedy]") == "test_group[greedy]"


def test_the_longest_group_is_first_and_none_is_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SECONDS", {"b.py": 5, "sglang requests graphs": 9})
    shared = [f"engines/sglang/test_{name}.py::1[graphs]" for name in ("seeds", "sampling")]
    names = ["a.py::1", "b.py::1", shared[0], "c.py::1", shared[1]]
    items = [SimpleNamespace(nodeid=f"tests/{name}") for name in names]
    schedule.longest_first(items)
    assert [item.nodeid.removeprefix("tests/") for item in items] == [names[i] for i in (2, 4, 1, 0, 3)]


def test_parts_have_every_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SECONDS", {"c.py": 5})
    names = [f"tests/{file}.py::{number}" for file in "abcde" for number in range(2)]
    parts = []
    for part in ("1/2", "2/2"):
        items = [SimpleNamespace(nodeid=name) for name in names]
        left = schedule.keep_part(items, part)
        assert sorted(item.nodeid for item in [*left, *items]) == names
        parts.append([item.nodeid for item in items])
    assert [sorted({name[6] for name in part}) for part in parts] == [["b", "c", "e"], ["a", "d"]]
    with pytest.raises(AssertionError, match="--part is 3/2, wanted K/N"):
        schedule.keep_part([], "3/2")


def test_two_workers_share_out_the_groups(tmp_path: Path) -> None:
    """In a small suite of its own: each file is run by one worker, and both workers have some."""
    support = ROOT / "tests/support"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(
        f"import sys; sys.path.append({str(support)!r})\n"
        "import schedule\n"
        "def pytest_xdist_make_scheduler(config, log): return schedule.make_scheduler(config, log)\n"
    )
    body = "import os, pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n):\n"
    body += "    open(__file__ + '.ran', 'a').write(os.environ['PYTEST_XDIST_WORKER'] + ' ')\n"
    for name in ("one", "two", "three"):
        (tmp_path / f"tests/test_{name}.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path / "tests")], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [path.read_text().split() for path in sorted((tmp_path / "tests").glob("*.ran"))]
    assert [len(workers) for workers in ran] == [4, 4, 4]
    assert all(len(set(workers)) == 1 for workers in ran)
    assert {workers[0] for workers in ran} == {"gw0", "gw1"}
