"""Two checkouts compared in one run: each server process must import the plugin of its own checkout."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.bench.spec import ServerSpec

ROOT = Path(__file__).parents[2]
PEER = ROOT / "tests/support/peer.py"


@pytest.fixture(scope="module")
def compare_commits():
    spec = importlib.util.spec_from_file_location("compare_commits", ROOT / "benchmarks/compare_commits.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_commits"] = module  # pydantic looks for the module of its classes
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare_commits"]


@pytest.fixture
def checkouts(tmp_path: Path) -> dict[str, Path]:
    """Two folders that look like checkouts, with a module that a server can import."""
    folders = {side: tmp_path / side for side in ("base", "new")}
    for folder in folders.values():
        (folder / "eagle_plugin").mkdir(parents=True)
        for name in ("__init__.py", "probe.py"):
            (folder / "eagle_plugin" / name).write_text("")
    return folders


@pytest.fixture
def arguments(any_head, checkouts, tmp_path, monkeypatch) -> list[str]:
    """Options of a comparison whose servers are peers that import the plugin; the new one has a third of the pauses."""

    def command(spec: ServerSpec, port: int) -> list[str]:
        gap = "0.03" if spec.name == "base" else "0.01"
        return [str(spec.python), str(PEER), str(port), "--gap", gap, "--import", "eagle_plugin.probe"]

    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], command=command))
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    options = [arg for flag in ("target", "head") for arg in (f"--{flag}", str(tmp_path / flag))]
    options += [arg for side in checkouts for arg in (f"--{side}", str(checkouts[side]))]
    options += ["--base-python", sys.executable, "--new-python", sys.executable, "--out", str(tmp_path / "out")]
    return [*options, "--max-tokens", "4", "--repeats", "4"]


def test_the_ratio_is_measured_and_written(compare_commits, arguments, checkouts, tmp_path, capsys):
    git = ["git", "-C", str(checkouts["new"]), "-c", "user.name=x", "-c", "user.email=x@x"]
    for args in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *args], check=True)
    (checkouts["new"] / "eagle_plugin/probe.py").write_text("changed = True\n")
    assert compare_commits.main(arguments) == 0
    document = json.loads((tmp_path / "out/compare-sglang.json").read_text())
    # Which side is the faster one, not by how much: a busy machine stretches the pauses.
    assert document["new_over_base"]["median"] > 1
    ratios = document["ratios"]
    means = [math.sqrt(a * b) for a, b in zip(ratios[:2], ratios[2:], strict=True)]
    assert document["new_over_base"]["median"] == pytest.approx(statistics.median(means), abs=1e-3)
    by_first = {"base": statistics.median(ratios[:2]), "new": statistics.median(ratios[2:])}
    assert document["by_first_start"] == pytest.approx(by_first, abs=1e-3)
    assert document["repeats"] == len(ratios) == 4
    assert document["same_responses"] == document["compared_responses"] == 12
    started = {folder.name: [log.name for log in folder.iterdir()] for folder in (tmp_path / "out/logs").iterdir()}
    assert started.keys() == {"base-first", "new-first"} and {len(logs) for logs in started.values()} == {2}
    assert document["base"]["commit"] == "unknown" and document["new"]["commit"].endswith("-dirty")
    assert f"new / base: {document['new_over_base']['median']:.3f} [" in capsys.readouterr().out


def test_a_plugin_from_elsewhere_is_refused(compare_commits, arguments, checkouts, tmp_path, monkeypatch, capsys):
    before = compare_commits.side_spec

    def wrong(plugin: ServerSpec, side: str, *rest: object) -> ServerSpec:
        spec = before(plugin, side, *rest)
        hook = spec.environment["PYTHONPATH"].split(os.pathsep)[0]
        return replace(spec, environment={"PYTHONPATH": f"{hook}{os.pathsep}{checkouts['base']}"})

    monkeypatch.setattr(compare_commits, "side_spec", wrong)
    assert compare_commits.main(arguments) == 1
    output = capsys.readouterr().out
    assert (
        f"sglang-plugin-bf16-new: the plugin was imported from {checkouts['base']}, wanted {checkouts['new']}" in output
    )
    assert not (tmp_path / "out/compare-sglang.json").exists()


def test_the_working_directory_does_not_come_first(compare_commits, checkouts, tmp_path, monkeypatch):
    """`python -m` puts the working directory before PYTHONPATH: a server started in this checkout would import it."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(compare_commits.SITECUSTOMIZE)
    plugin = ServerSpec(tmp_path, "plugin", tmp_path)
    spec = compare_commits.side_spec(plugin, "base", checkouts["base"], Path(sys.executable), hook)
    monkeypatch.chdir(checkouts["new"])
    logs = {}
    for directory in (spec.directory, None):
        command = [sys.executable, "-m", "eagle_plugin.probe"]
        log = tmp_path / f"{directory is None}.log"
        environment = os.environ | dict(spec.environment)
        server = Server(command, 1, "probe", log, environment, directory=directory).start()
        server._process.wait(30)
        logs[directory] = server
    compare_commits.check_sources(logs[spec.directory], checkouts["base"])
    with pytest.raises(ServerError, match=f"imported from {checkouts['new']}, wanted {checkouts['base']}"):
        compare_commits.check_sources(logs[None], checkouts["base"])


def test_a_checkout_without_environment_is_refused(compare_commits, arguments, checkouts, capsys):
    at = arguments.index("--base-python")
    assert compare_commits.main(arguments[:at] + arguments[at + 2 :]) == 2
    assert "no such file; run `make env` in" in capsys.readouterr().out
    assert compare_commits.main([*arguments, "--base", str(checkouts["base"].parent)]) == 2
    assert "give the root of a checkout" in capsys.readouterr().out
