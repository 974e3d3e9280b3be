"""The commands of docs/tutorial.md, run in their order on tiny models: only its variables have other values."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from document_commands import EXPORT, ROOT, Part, parts_of
from serving import VLLM_PYTHON
from serving import _next_port as next_port

PAGE = (ROOT / "docs/tutorial.md").read_text("utf-8")
SIZES = {"REQUESTS": "24", "TOKENS": "24", "EPOCHS": "1", "CLIENTS": "1", "REPEATS": "1"}
STOP = re.compile(r"Stop\s+the\s+server\s+with\s+Ctrl-C")
START_SECONDS, SECONDS = 400, 800
# `watch` wants more rounds than a short test has.
CODES = {"eagle-plugin watch": (0, 3)}


class Terminals:
    """Runs the blocks of the page: a server in the background, all else until it ends."""

    def __init__(self, folder: Path, environment: dict[str, str], values: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.exports = "".join(f"export {name}='{value}'\n" for name, value in values.items())
        self.server: subprocess.Popen[bytes] | None = None
        self.servers: list[str] = []
        self.output = ""

    def run(self, block: Part) -> None:
        """Run a block to its end; what all blocks printed is in `output`."""
        done = subprocess.run(
            self._bash(block), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )
        codes = next((codes for command, codes in CODES.items() if command in block.text), (0,))
        assert done.returncode in codes, f"{block.text}\n{done.stdout}\n{done.stderr}\n{self._log()}"
        self.output += done.stdout

    def start(self, block: Part) -> None:
        """Start the server of a block, and wait until it says that it serves."""
        assert self.server is None, "the page starts a server while another one runs"
        log = self.folder / "server.log"
        with log.open("wb") as sink:
            self.server = subprocess.Popen(
                self._bash(block), cwd=self.folder, env=self.environment, stdout=sink, stderr=sink
            )
        end = time.monotonic() + START_SECONDS
        while "Ctrl-C stops it" not in log.read_text():
            assert self.server.poll() is None and time.monotonic() < end, self._log()
            time.sleep(0.3)
        self.servers.append(log.read_text())

    def stop(self) -> None:
        """End the server by SIGTERM: where tests run in the background of a shell, SIGINT is ignored."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            try:
                assert self.server.wait(60) == 128 + signal.SIGTERM, self._log()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    self.server.kill()
                self.server = None

    def _bash(self, block: Part) -> list[str]:
        # exec: the signals are for the command and not for a shell around it.
        text = f"exec env {block.text}" if block.title else block.text
        return ["bash", "-euo", "pipefail", "-c", f"{self.exports}{text}"]

    def _log(self) -> str:
        log = self.folder / "server.log"
        return log.read_text()[-3000:] if log.exists() else ""


def steps(page: str, engine: str) -> Iterator[Part | None]:
    """The blocks of the page for this engine in their order; None where the server is stopped."""
    for part in parts_of(page):
        if part.language is None:
            if STOP.search(part.text):
                yield None
        elif not part.title or part.title.endswith(engine):
            yield part


def follow(page: str, engine: str, terminals: Terminals) -> None:
    """Run all blocks but those that install, which tests/test_wheel.py does, and that of the variables."""
    try:
        for block in steps(page, engine):
            if block is None:
                terminals.stop()
            elif block.title:
                terminals.start(block)
            elif not block.text.startswith(("pip install", "export")):
                terminals.run(block)
    finally:
        terminals.stop()


def variables(target: Path, head: Path) -> dict[str, str]:
    return {"TARGET": str(target), "HEAD": str(head), "PORT": str(next_port())} | SIZES


def environment(commands: Path, **more: str) -> dict[str, str]:
    """commands: the folder of `eagle-plugin`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_CAPTURE")}
    return kept | {"PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def test_the_page_has_the_variables_that_are_replaced() -> None:
    assert dict(EXPORT.findall(PAGE)).keys() == variables(Path("a"), Path("b")).keys()
    for engine in ("SGLang", "vLLM"):
        servers = [block is not None and bool(block.title) for block in steps(PAGE, engine)]
        stops = [block is None for block in steps(PAGE, engine)]
        assert sum(servers) == 3 and sum(stops) == 2, engine


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_sglang_goes_the_whole_way(tmp_path: Path) -> None:
    target = tiny_models.markov_target(tmp_path / "target")
    head = tiny_models.markov_eagle3_head(tmp_path / "head", target)
    terminals = Terminals(tmp_path, environment(Path(sys.executable).parent), variables(target, head))
    follow(PAGE, "SGLang", terminals)
    assert all("is served by the plugin's draft trees" in log for log in terminals.servers)
    assert '"content":' in terminals.output and "eagle_plugin:verify_rounds_total" in terminals.output
    assert re.search(r"^state +finished$", terminals.output, re.MULTILINE), terminals.output
    records = (tmp_path / "out/traffic.jsonl").read_text().splitlines()
    assert len(records) == int(SIZES["REQUESTS"])
    assert "<html" in (tmp_path / "out/report/report.html").read_text()
    package = json.loads((tmp_path / "out/package/package.json").read_text())
    assert {row["state"] for row in package["measured"]["benchmark"]["rows"]} == {"none", "base", "trained"}
    assert " rounds, " in terminals.output.splitlines()[-1]  # of `watch`


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")
def test_vllm_serves_and_records(tmp_path: Path) -> None:
    """Up to the record: vLLM's environment of the tests has no filter of private data, which this one lends."""
    target = tiny_models.tiny_llama(tmp_path / "target", head_dim=32)
    head = tiny_models.tiny_eagle3_head(tmp_path / "head", target)
    variables_of_vllm = {"EAGLE_CAPTURE_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    variables_of_vllm |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own = environment(VLLM_PYTHON.parent, **variables_of_vllm)
    terminals = Terminals(tmp_path, own, variables(target, head))
    follow(PAGE.partition("## 6.")[0], "vLLM", terminals)
    assert all("is served by the plugin's draft trees" in log for log in terminals.servers)
    assert '"content":' in terminals.output and "eagle_plugin:verify_rounds_total" in terminals.output
    assert re.search(rf"records +│? *{SIZES['REQUESTS']}\b", terminals.output), terminals.output
