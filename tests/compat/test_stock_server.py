"""Stock SGLang on this CPU: plain decoding and its own EAGLE-3 worker, both on our kernels, give the same text."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import requests

pytest.importorskip("sglang")
pytestmark = pytest.mark.server
START_SECONDS = 300  # about 30 on an idle machine, nearly all of it imports

SHARED = "The committee met on a cold morning in November to discuss the new rules about trees and"
PROMPTS = [
    "a",
    "hello",
    "def build_tree(parents):",
    "zebra crossing " * 12,
    SHARED,
    SHARED + " branches",
    SHARED + " branches and leaves",
    SHARED + " roots",
    *(f"prompt number {i} about draft trees" for i in range(4)),
]
TREE = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"]

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRY_POINT = "[sglang.srt.plugins]\neagle_sglang_cpu = eagle_sglang_cpu:register\n"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def plugin_path(folder: Path) -> str:
    """PYTHONPATH under which SGLang finds our packages and, where they are not installed, their entry point."""
    if not any(e.name == "eagle_sglang_cpu" for e in entry_points(group="sglang.srt.plugins")):
        info = folder / "eagle_plugin_sglang_cpu-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle-plugin-sglang-cpu\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)
    return os.pathsep.join(map(str, (folder, REPOSITORY, REPOSITORY / "compat" / "sglang-cpu" / "src")))


class StockServer:
    """`python -m sglang.launch_server` in a process group of its own, with no --attention-backend."""

    def __init__(self, folder: Path, target: Path, *extra: str):
        self.port, self.log_path = free_port(), folder / "server.log"
        folder.mkdir(parents=True)
        env = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_PLUGINS": "eagle_sglang_cpu",  # the engine's own worker, not ours
            "PYTHONPATH": plugin_path(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), "--device", "cpu"]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port), "--skip-server-warmup"]
        command += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--context-length", "512", *extra]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def wait(self, seconds: float) -> None:
        """Return when the server answers; RuntimeError with the end of its log when it dies or takes longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.3)
        raise RuntimeError(f"the server did not start (exit status {self.process.poll()}):\n{self.log()[-3000:]}")

    def get(self, path: str) -> dict:
        return requests.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).json()

    def generate(self, prompt: str, tokens: int, **sampling) -> dict:
        body = {"text": prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True} | sampling}
        answer = requests.post(f"http://127.0.0.1:{self.port}/generate", json=body, timeout=120)
        answer.raise_for_status()
        return answer.json()

    def generate_all(self, prompts: list[str], tokens: int, at_once: int) -> list[dict]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda p: self.generate(p, tokens, temperature=0), prompts))

    def stop(self) -> None:
        for sent, seconds in ((signal.SIGINT, 5), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)  # the group outlives its leader while the scheduler runs
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, tiny_target, tiny_eagle3):
    folder = tmp_path_factory.mktemp("stock")
    head = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(tiny_eagle3)]
    started = [
        StockServer(folder / "plain", tiny_target),
        StockServer(folder / "eagle3", tiny_target, *head, *TREE),
    ]
    try:
        for server in started:
            server.wait(START_SECONDS)
        yield started
    finally:
        for server in started:
            server.stop()


def test_no_flag_is_needed_for_attention(servers):
    for server in servers:
        assert server.get("/server_info")["attention_backend"] == "intel_amx"
        log = server.log()
        assert "fallback to torch_native" not in log
        assert "Failed to apply hooks" not in log and "Failed to execute general plugin" not in log


def test_greedy_text_with_draft_trees_equals_plain_decoding(servers):
    plain, eagle3 = servers
    expected = [answer["output_ids"] for answer in plain.generate_all(PROMPTS, 32, at_once=1)]
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    for at_once in (1, 6):  # the second round also meets the prefix cache of the first
        answers = eagle3.generate_all(PROMPTS, 32, at_once)
        assert [answer["output_ids"] for answer in answers] == expected
        assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
    answers = plain.generate_all(PROMPTS, 32, at_once=6)
    assert [answer["output_ids"] for answer in answers] == expected
