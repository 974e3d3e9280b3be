"""A real Prometheus: Debian's package, unpacked into a folder of the tests, running on 127.0.0.1."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

START_SECONDS = 60


def programs(folder: Path) -> Path:
    """The folder with `prometheus` and `promtool`; skips the test, with apt's reason, where they cannot be had."""
    installed = shutil.which("prometheus")
    if installed and shutil.which("promtool"):
        return Path(installed).parent
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("there is no Prometheus here, and no apt-get and dpkg-deb, which could fetch Debian's")
    lists, cache = folder / "lists", folder / "cache"
    for place in (lists, cache):
        (place / "partial").mkdir(parents=True)
    own = [f"Dir::State::Lists={lists}", f"Dir::Cache={cache}", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-qq", *(part for option in own for part in ("-o", option))]
    for command in ([*apt, "update"], [*apt, "download", "prometheus"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Debian's package of Prometheus cannot be had: {done.stderr.strip()[-300:]}")
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "unpacked"], check=True)
    return folder / "unpacked/usr/bin"


@contextmanager
def running(program: Path, config: Path, folder: Path, port: int) -> Iterator[str]:
    """Start it with that configuration and its data in `folder`; the address of its API. Stopped on the way out."""
    log = folder / "prometheus.log"
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [program, *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=sink, stderr=sink, cwd=folder
        )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not _ready(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:  # not listening yet
        return False


def ask(url: str, path: str, **parameters: str) -> Any:
    """What the API answers as `data`."""
    answer = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=30, trust_env=False)
    assert answer.status_code == 200, f"{parameters}: {answer.text}"
    return answer.json()["data"]
