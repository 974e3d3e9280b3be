"""Server processes: command lines, start failures, pauses, and process groups that always end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from eagle_plugin.bench.servers import Server, ServerError, check_worker, child_environment, free_port
from eagle_plugin.bench.sglang_server import command as sglang_command
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import Shape

TARGET, HEAD = Path("target"), Path("head")


def script(tmp_path: Path, code: str) -> Server:
    return Server([sys.executable, "-c", code], free_port(), "script", tmp_path / "script.log", os.environ)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_plain_has_no_speculative_flag_and_switches_the_plugin_off():
    spec = ServerSpec(TARGET, "plain", threads=2)
    command = sglang_command(spec, 1234)
    assert not [word for word in command if "speculative" in word]
    assert value_of(command, "--host") == "127.0.0.1" and value_of(command, "--port") == "1234"
    child = child_environment(spec, {"EAGLE_PLUGIN": "1", "KEPT": "yes"})
    assert child["EAGLE_PLUGIN"] == "0" and child["OMP_NUM_THREADS"] == "2" and child["KEPT"] == "yes"


def test_builtin_and_plugin_differ_by_the_environment_alone():
    builtin = ServerSpec(TARGET, "builtin", HEAD, Shape(3, 2, 6))
    plugin = ServerSpec(TARGET, "plugin", HEAD, Shape(3, 2, 6))
    command = sglang_command(plugin, 1)
    assert sglang_command(builtin, 1) == command
    assert value_of(command, "--speculative-num-steps") == "3"
    assert value_of(command, "--speculative-eagle-topk") == "2"
    assert value_of(command, "--speculative-num-draft-tokens") == "6"
    # If the shell switches the plugin off, the engine alone would be measured under the plugin's name.
    assert child_environment(plugin, {"EAGLE_PLUGIN": "0"})["EAGLE_PLUGIN"] == "1"
    assert child_environment(builtin, {})["EAGLE_PLUGIN"] == "0"


@pytest.mark.parametrize(
    ("generation", "architecture", "shape", "device", "wanted"),
    [
        (10, "GptOssForCausalLM", Shape(7, 2, 8), "cuda", True),
        (10, "GptOssForCausalLM", Shape(3, 1, 4), "cuda", False),
        (9, "GptOssForCausalLM", Shape(7, 2, 8), "cuda", False),
        (10, "LlamaForCausalLM", Shape(7, 2, 8), "cuda", False),
        (10, "GptOssForCausalLM", Shape(2, 4, 8), "cpu", False),
    ],
)
def test_trees_get_a_backend_that_takes_them(
    generation: int,
    architecture: str,
    shape: Shape,
    device: str,
    wanted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of some targets SGLang itself chooses one that ends the start with a tree, on Blackwell GPUs."""
    monkeypatch.setattr("eagle_plugin.bench.sglang_server.gpu_generation", lambda: generation)
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    for mode in ("builtin", "plugin"):
        spec = ServerSpec(tmp_path, mode, HEAD, shape, device=device, extra_flags=("--attention-backend", "fa3"))
        command = sglang_command(spec, 1)
        assert (command[command.index("--attention-backend") + 1] == "triton") == wanted
        assert command[-1] == "fa3", "the user's own comes last"


def test_speculation_needs_a_head():
    with pytest.raises(ValueError, match="needs a draft head"):
        ServerSpec(TARGET, "plugin")


def test_extra_flags_come_last():
    spec = ServerSpec(TARGET, "plain", extra_flags=("--port", "7"))
    assert sglang_command(spec, 1)[-2:] == ["--port", "7"]


def test_a_server_that_dies_shows_its_last_lines(start_peer):
    server = start_peer("dying", "--die-after-start")
    with pytest.raises(ServerError, match="hidden size 7") as failure:
        server.wait_ready(30)
    assert "exit code 3" in str(failure.value)
    server.stop()
    assert server.members() == []


def test_a_server_that_never_answers_is_given_up(tmp_path):
    with (
        script(tmp_path, "import time; print('loading', flush=True); time.sleep(60)") as server,
        pytest.raises(ServerError, match=r"not ready after .*printed nothing for 1 s.*\n.*loading"),
    ):
        server.wait_ready(1.0)


def test_a_server_that_repeats_a_line_is_given_up(tmp_path):
    """vLLM's engine says every minute that it waits, without end."""
    code = (
        "import time\n"
        "for second in range(600):\n"
        "    print(time.strftime('INFO %m-%d %H:%M:%S'), f'No broadcast block found in {second} seconds', flush=True)\n"
        "    time.sleep(0.2)\n"
    )
    with (
        script(tmp_path, code) as server,
        pytest.raises(ServerError, match=r"not ready after .*printed nothing new for 6 s.*\n.*broadcast"),
    ):
        server.wait_ready(2.0)


def test_a_server_that_the_plugin_leaves_to_the_engine_is_not_waited_for(tmp_path):
    """The line comes before the target is loaded, and other lines after it."""
    code = (
        "import time\n"
        "print('eagle-plugin 0.1.0: EAGLE3 is served by SGLang\\'s own worker: --pp-size 2: not served', flush=True)\n"
        "print('loading', flush=True)\n"
        "time.sleep(60)\n"
    )
    with script(tmp_path, code) as server:
        server.mode = "plugin"
        with pytest.raises(ServerError, match="the plugin does not serve: it logged .*--pp-size 2: not served"):
            server.wait_ready(30.0)
    silent = script(tmp_path, "")  # of the engine's own speculation the line says nothing new
    silent.mode = "builtin"
    assert Server.of(ServerSpec(TARGET, "plugin", HEAD), tmp_path).mode == "plugin"
    with pytest.raises(ServerError, match="ended with exit code 0"), silent:
        silent.wait_ready(30.0)


def test_a_failure_begins_with_the_plugins_own_line(tmp_path):
    """It is above the last lines that are shown, and often the reason."""
    code = (
        "print('[now] eagle-plugin: the head does not fit')\nfor i in range(99): print('line', i)\nraise SystemExit(3)"
    )
    with script(tmp_path, code) as server, pytest.raises(ServerError) as failure:
        server.wait_ready(30.0)
    first, *others = str(failure.value).splitlines()
    assert "exit code 3" in first and "the plugin logged 'eagle-plugin: the head does not fit'" in first
    assert others[-1] == "  | line 98" and not any("eagle-plugin" in line for line in others)


def test_a_server_that_prints_how_far_it_is_may_take_longer(tmp_path):
    """Of a large target: 8 lines in 4 s, while 2 s without one would be too long."""
    code = (
        "import http.server, sys, time\n"
        "for i in range(8):\n"
        "    print('loading', i, flush=True)\n"
        "    time.sleep(0.5)\n"
        "class Healthy(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Healthy).serve_forever()\n"
    )
    server = script(tmp_path, code)
    server.command.append(str(server.port))
    with server:
        assert server.wait_ready(2.0) > 4.0


def test_the_whole_group_ends_even_when_it_ignores_sigterm(tmp_path):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    server = script(tmp_path, code).start()
    deadline = time.monotonic() + 20
    while not server.log_text().strip() and time.monotonic() < deadline:
        time.sleep(0.05)
    grandchild = int(server.log_text())
    assert grandchild in server.members()
    time.sleep(0.5)  # until the grandchild ignores the signal too
    server.pause()
    server.stop(grace_s=0.5)
    assert gone(grandchild)
    server.stop()  # a second time is harmless


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("request_to_end", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_takes_its_server_along(tmp_path, request_to_end, paused):
    """After SIGKILL the command cannot stop it any more; its guard does, and ends itself."""
    code = (
        "import os, sys, time, pathlib\n"
        "from eagle_plugin.bench.servers import Server\n"
        "from eagle_plugin.common.command_end import sigterm_as_exit\n"
        "with sigterm_as_exit():\n"
        "    with Server([sys.executable, '-c', 'import time; time.sleep(60)'], 1, 'x', "
        "pathlib.Path(sys.argv[1]), os.environ) as server:\n"
        f"        {'server.pause()' if paused else 'pass'}\n"
        "        print(server.members()[0], server._guard._process.pid, flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x.log")], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        server, guard = map(int, command.stdout.readline().split())
        assert psutil.pid_exists(server) and psutil.pid_exists(guard)
        command.send_signal(request_to_end)
        assert command.wait(20) == (128 + signal.SIGTERM if request_to_end == signal.SIGTERM else -signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not (gone(server) and gone(guard)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(server) and gone(guard)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_paused_server_uses_no_time_and_answers_afterwards(peer):
    peer.pause()
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{peer.url}/health", timeout=0.5)
    peer.resume()
    assert httpx.get(f"{peer.url}/health", timeout=10).status_code == 200


def test_who_serves_is_read_from_the_log(peer, tmp_path):
    assert "tree worker" in check_worker(peer, "plugin")
    with pytest.raises(ServerError, match="the engine alone was asked for"):
        check_worker(peer, "builtin")
    silent = script(tmp_path, "")
    with pytest.raises(ServerError, match="no line of it"):
        check_worker(silent, "plugin")
    assert check_worker(silent, "builtin") == "" == check_worker(silent, "plain")
    silent.log.write_text("[now] eagle-plugin 0.1: EAGLE3 is served by SGLang's own worker: MLA is not served yet\n")
    with pytest.raises(ServerError, match="MLA is not served yet"):
        check_worker(silent, "plugin")
    assert check_worker(silent, "builtin") == ""
    # A self-test of the real round that fails comes after the first line.
    silent.log.write_text(
        "[now] eagle-plugin 0.1: EAGLE3 is served by the plugin's draft trees\n"
        "[now] eagle-plugin 0.1: EAGLE3 is served by SGLang's own worker: the self-test failed\n"
    )
    with pytest.raises(ServerError, match="the self-test failed"):
        check_worker(silent, "plugin")
