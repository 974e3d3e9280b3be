"""The wheels, installed beside each engine and used from an empty folder, as by somebody without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from serving import VLLM_PYTHON

from eagle_plugin.bench.servers import free_port
from eagle_plugin.models import get_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
HEAD, TARGET = "smollm2-135m-instruct-eagle3", "smollm2-135m-instruct"
# Without PYTHONPATH, which names this checkout, and without what a launcher may have set for the plugin.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EAGLE_PLUGIN"))}


class Environment(NamedTuple):
    """A virtual environment with the wheels, and an empty folder to work in."""

    python: Path
    folder: Path

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """A command of the environment in the empty folder."""
        command = [str(self.python.with_name(str(args[0]))), *map(str, args[1:])]
        return subprocess.run(command, cwd=self.folder, env=CLEAN, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All wheels, built from the files that git knows or would add; without compiled kernels, which takes minutes."""
    folder = tmp_path_factory.mktemp("wheels")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name)
    source = folder / "source"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, env=CLEAN | {"EAGLE_BUILD": "none"}, timeout=300)
    for project in ("compat/sglang-cpu", "examples/heads"):
        subprocess.run([*command[:-1], str(source / project)], check=True, env=CLEAN, timeout=300)
    return sorted(folder.glob("*.whl"))


def install(folder: Path, wheels: list[Path], packages: Path | None) -> Environment:
    """A new environment with these wheels before all other packages, which it finds in the folder `packages`.

    A path in a .pth file adds the folder without reading the .pth files in it, so that nothing that is installed there
    as editable can stand in for the wheels.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, env=CLEAN)
    python = folder / "env/bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, *map(str, wheels)], check=True, env=CLEAN)
    if packages is not None:
        (own,) = (folder / "env").glob("lib/python*/site-packages")
        (own / "engine.pth").write_text(f"{packages}\n")
    (folder / "empty").mkdir()
    return Environment(python, folder / "empty")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory, wheels: list[Path]) -> Callable[[str], Environment]:
    """A function that gives the environment of an engine; each is made once."""
    made: dict[str, Environment] = {}

    def environment(engine: str) -> Environment:
        if engine not in made:
            python = Path(sys.executable) if engine == "sglang" else VLLM_PYTHON
            if not python.exists():
                pytest.skip("there is no .venv-vllm; make it with `make env-vllm`")
            (packages,) = python.parents[1].glob("lib/python*/site-packages")
            ours = [wheel for wheel in wheels if engine == "sglang" or "sglang" not in wheel.name]
            made[engine] = install(tmp_path_factory.mktemp(engine), ours, packages)
        return made[engine]

    return environment


def test_the_wheel_has_what_a_checkout_has_beside_the_package(wheels: list[Path]) -> None:
    plugin, heads, compat = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    for folder in ("csrc", "examples/prompts", "examples/recipes"):
        wanted = {f"eagle_plugin/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert wanted and wanted <= plugin
    assert not [name for name in plugin if "/heads/smollm2" in name]
    files = {path.relative_to(ROOT / "examples/heads") for path in (ROOT / "examples/heads").glob("smollm2-*/*")}
    assert files and {f"eagle_plugin_heads/{name}" for name in files} <= heads
    assert "eagle_plugin/py.typed" in plugin and not [name for name in plugin if name.startswith(("tests", "compat"))]
    (points,) = [name for name in plugin if name.endswith(".dist-info/entry_points.txt")]
    points = zipfile.ZipFile(wheels[0]).read(points).decode()
    for group in ("sglang.srt.plugins", "vllm.general_plugins"):
        assert f"[{group}]\neagle_plugin = " in points
    sources = {path.name for path in (ROOT / "compat/sglang-cpu/src/eagle_sglang_cpu/csrc").glob("*.cc")}
    assert sources and {f"eagle_sglang_cpu/csrc/{name}" for name in sources} <= compat


def test_without_an_engine(wheels: list[Path], tmp_path: Path) -> None:
    """Nothing but the wheel: versions are told, and what needs more says so in one line."""
    alone = install(tmp_path, wheels[:1], None)
    version = alone.run("eagle-plugin", "version")
    assert version.returncode == 0 and version.stdout.count("not installed") == 4, version.stderr
    refused = alone.run("eagle-plugin", "serve")
    assert refused.returncode == 2 and refused.stderr.startswith("error: this command needs the Python package ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.matrix)])
def test_the_engine_finds_the_plugin(beside: Callable[[str], Environment], engine: str) -> None:
    """By the engine's own loader, in the wheel; and the command that is installed works in an empty folder."""
    environment = beside(engine)
    loader = {
        "sglang": "from sglang.srt.plugins import load_plugins_by_group as load; found = load('sglang.srt.plugins')",
        "vllm": "from vllm.plugins import load_plugins_by_group as load; found = load('vllm.general_plugins')",
    }
    script = f"import eagle_plugin; {loader[engine]}; print('found', eagle_plugin.__file__, *sorted(found))"
    done = environment.run("python", "-c", script)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")] or [done.stderr]
    _, file, *names = line.split()
    assert Path(file).is_relative_to(environment.python.parents[1])
    ours = [name for name in names if name.startswith("eagle")]  # vLLM has plugins of its own
    assert ours == (["eagle_plugin", "eagle_sglang_cpu"] if engine == "sglang" else ["eagle_plugin"])
    version = environment.run("eagle-plugin", "version")
    rows = dict(line.split(maxsplit=1) for line in version.stdout.splitlines())
    assert rows[engine] != "not installed" and "not active" not in rows[engine]
    assert rows["kernels"] == "native (C++)", version.stderr  # built from csrc/ of the wheel, or found in the cache
    assert list(environment.folder.iterdir()) == []


def test_check_takes_the_names_of_target_and_head(beside: Callable[[str], Environment]) -> None:
    get_model(TARGET)
    done = beside("sglang").run("eagle-plugin", "check", TARGET, HEAD, "--files-only")
    assert done.returncode == 0, done.stderr
    assert str(beside("sglang").python.parents[1]) in done.stdout and "16,384 of 49,152 tokens" in done.stdout


@pytest.fixture
def served(beside: Callable[[str], Environment], request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """`eagle-plugin serve`, with the options of the test, until it says that it serves: its address and its output."""
    engine, *options = request.param
    environment, port = beside(engine), free_port()
    get_model(TARGET)
    log = environment.folder / "serve.log"
    command = [str(environment.python.with_name("eagle-plugin")), "serve", "--port", str(port), *options]
    with log.open("w") as sink:
        process = subprocess.Popen(command, cwd=environment.folder, env=CLEAN, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 400
        while "Ctrl-C stops it" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()  # SIGINT is ignored where the tests run in the background of a shell
        assert process.wait(60) == 128 + signal.SIGTERM, log.read_text()


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.parametrize(
    "served", [("sglang",), ("vllm",), ("sglang", "--plain"), ("vllm", "--plain")], indirect=True, ids=" ".join
)
def test_serve_answers_its_curl_command(served: tuple[str, Path], request: pytest.FixtureRequest) -> None:
    url, log = served
    (example,) = [line for line in log.read_text().splitlines() if line.startswith("curl ")]
    answer = subprocess.run(example, shell=True, capture_output=True, text=True, timeout=120).stdout
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert len(text.split()) > 10, answer
    plain = "plain" in request.node.callspec.id
    assert ("is served by the plugin's draft trees" in log.read_text()) is not plain
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert not plain or "eagle_plugin" not in metrics
