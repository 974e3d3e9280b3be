"""Jobs on a real Ray cluster: placed where there is room, stopped while they wait, continued after a node is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from eagle_plugin.bench.servers import free_port
from eagle_plugin.cli import main
from eagle_plugin.common.errors import UserError
from eagle_plugin.learning import Job

ROOT = Path(__file__).parents[2]
RAY = ROOT / ".venv-ray/bin/ray"
SECONDS = 240  # for whatever is waited for, on a busy machine


class Cluster:
    """A node without room for jobs, which has the dashboard, and nodes with one core each."""

    def __init__(self, folder: Path) -> None:
        port, dashboard = free_port(), free_port()
        self.address, self._gcs, self._folder = f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", folder
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)}
        # The jobs' `eagle-plugin` is that of this environment; Ray's own processes are those of .venv-ray.
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own | {"PATH": paths}
        head = ["--head", "--num-cpus=0", f"--port={port}", "--dashboard-host=127.0.0.1"]
        self._start(*head, f"--dashboard-port={dashboard}", "--include-dashboard=true")
        until(self._answers)

    def add_node(self) -> None:
        """A further node."""
        self._start(f"--address={self._gcs}", "--num-cpus=1")

    def _start(self, *options: str) -> None:
        shared = ["--node-ip-address=127.0.0.1", "--disable-usage-stats", "--num-gpus=0"]
        command = [str(RAY), "start", *options, *shared]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.address}/api/version", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def lose_newest_node(self) -> None:
        """Kill all processes of the node that started last."""
        raylets = []
        for process in psutil.process_iter(["cmdline", "create_time"]):
            line = process.info["cmdline"] or [""]
            if line[0].endswith("raylet") and any(str(self._folder) in part for part in line):
                raylets.append(process)
        newest = max(raylets, key=lambda process: process.info["create_time"])
        for process in (newest, *newest.children(recursive=True)):
            process.kill()

    def stop(self) -> None:
        """End all of its processes."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            if (process.info["environ"] or {}).get("RAY_TMPDIR") == str(self._folder):
                process.kill()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    if not RAY.exists():
        pytest.skip("there is no .venv-ray; make it with `make env-ray`")
    (packages,) = RAY.parents[1].glob("lib/python*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    made = Cluster(Path("/tmp") / f"ray-{os.getpid()}")  # Ray's sockets need a short name
    yield made
    made.stop()


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_a_job_on_a_cluster(
    cluster: Cluster, tiny_target: Path, tiny_eagle3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = str(tmp_path / "jobs")
    keys = ["--workflow", "own-head", "--target", str(tiny_target), "--head", str(tiny_eagle3), "--jobs", jobs]
    keys += ["--set", "evaluate=[]", "--set", "benchmark=false"]
    given = ["--ray", cluster.address, "--cpus", "1"]

    def cluster_of(name: str) -> str:
        found = Job(name, jobs).on_cluster()
        assert found is not None and found[0] == cluster.address
        return found[1]

    # No node has room: it waits, and can be stopped.
    assert main(["optimize", "create", "one", *keys, *given]) == 0
    assert cluster_of("one") == "PENDING" and Job("one", jobs).describe().shown == "created"
    with pytest.raises(UserError, match="the job one is PENDING on the cluster"):
        Job("one", jobs).submit(cluster.address)
    assert main(["optimize", "stop", "one", "--jobs", jobs]) == 0
    cluster.add_node()  # Ray ends it when it would begin
    until(lambda: cluster_of("one") == "STOPPED")
    assert Job("one", jobs).describe().shown == "created"

    # It runs on a node, and ends with the node.
    assert main(["optimize", "resume", "one", "--jobs", jobs, *given]) == 0
    until(lambda: cluster_of("one") == "RUNNING")
    cluster.lose_newest_node()
    with pytest.raises(UserError, match="the job one ended on the cluster"):
        Job("one", jobs).wait(SECONDS)

    # On another node it goes on.
    cluster.add_node()
    Job("one", jobs).submit(cluster.address)
    assert Job("one", jobs).wait(SECONDS).shown == "finished"
    assert (tmp_path / "jobs/one/package").is_dir()
    capsys.readouterr()
    assert main(["optimize", "describe", "one", "--jobs", jobs]) == 0
    assert f"cluster       SUCCEEDED on {cluster.address}" in capsys.readouterr().out
    assert json.loads((tmp_path / "jobs/one.lineage.json").read_text())
    with pytest.raises(UserError, match=r"--ray http://127\.0\.0\.1:9: the cluster does not take that"):
        Job("one", jobs).submit("http://127.0.0.1:9")


def test_an_environment_without_ray(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a cluster was given the job before: all else of it is told."""
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    job = Job.create("one", jobs=str(tmp_path), workflow="scratch-builtin", target=str(tiny_target))
    with pytest.raises(UserError, match=r"--ray needs the Python package ray: pip install '\.\[ray\]' in the"):
        job.submit("http://127.0.0.1:9")
    assert job.on_cluster() is None
    (tmp_path / "one.ray.json").write_text('{"address": "http://127.0.0.1:9", "id": "gone"}')
    assert main(["optimize", "describe", "one", "--jobs", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert "state         created\n" in found and "cluster       --ray needs the Python package ray" in found
