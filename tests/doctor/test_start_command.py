"""What `eagle-plugin doctor` makes of the args of a start command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from eagle_plugin.doctor.start_command import StartCommandError, read_command

FLAGS = ["MODEL", "--port", "1"]


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has the scripts of both engines, as pip and uv write them."""
    first = {
        "vllm": "#!/opt/my-env/bin/python3.12\n",
        "sglang": "#!/bin/sh\n'''exec' \"/opt/other env/bin/python\" \"$0\" \"$@\"\n' '''\n",
    }
    for name, text in first.items():
        (tmp_path / name).write_text(text + "import sys\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    return {"PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("args", "engine", "python", "arguments"),
    [
        (["vllm", "serve", *FLAGS], "vllm", "/opt/my-env/bin/python3.12", ["serve", *FLAGS]),
        (["sglang", "serve", *FLAGS], "sglang", "/opt/other env/bin/python", ["--model-path", *FLAGS]),
        (["sglang", "serve", "--model-type", "llm", "--tp", "2"], "sglang", "/opt/other env/bin/python", ["--tp", "2"]),
        (["python", "-u", "-m", "sglang.launch_server", *FLAGS], "sglang", None, FLAGS),
        (["python", "-m", "vllm.entrypoints.cli.main", "serve", *FLAGS], "vllm", None, ["serve", *FLAGS]),
        (["python", "-m", "vllm.entrypoints.openai.api_server", *FLAGS], "vllm", None, FLAGS),
    ],
)
def test_engine_interpreter_and_flags(args, engine, python, arguments, programs) -> None:
    command = read_command(args, programs)
    assert (command.engine, command.arguments, command.environment) == (engine, arguments, {})
    assert str(command.python) == (python or os.path.join(programs["PATH"], "python"))


def test_the_environment_of_a_command_and_its_wrappers(programs) -> None:
    args = ["nohup", "env", "-i", "A=1", "numactl", "-N", "0", "vllm", "serve", "B=2"]
    command = read_command(args, programs)
    assert command.environment == {"A": "1"} and command.arguments == ["serve", "B=2"]
    line = read_command(['EAGLE_PLUGIN=0 vllm serve MODEL --speculative-config \'{"model": "a b"}\''], programs)
    assert line.environment == {"EAGLE_PLUGIN": "0"} and line.arguments[-1] == '{"model": "a b"}'
    other = read_command([f"PATH={programs['PATH']}", "vllm", "serve", "M"], {"PATH": "/nowhere"})
    assert str(other.python) == "/opt/my-env/bin/python3.12"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["docker", "run", "vllm/vllm-openai"], "the command starts 'docker'; wanted `vllm serve"),
        (["A=1"], "starts nothing"),
        (["nohup"], "starts nothing"),
        (["vllm", "chat"], "`vllm chat`, which starts no server"),
        (["sglang"], "`sglang`, which starts no server"),
        (["python", "serve.py"], "'python without -m'"),
        (["python", "-m", "http.server"], "'python -m http.server'"),
        (["vllm serve 'MODEL"], "close its quotes"),
        (["/nowhere/vllm", "serve", "M"], "'/nowhere/vllm' is not in PATH"),
    ],
)
def test_what_starts_no_server_is_refused_in_one_sentence(args, message, programs) -> None:
    with pytest.raises(StartCommandError) as caught:
        read_command(args, programs)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_program_that_is_no_python_script(programs) -> None:
    script = Path(programs["PATH"]) / "vllm"
    for content in (b"\x7fELF\xff\xfe", b"", b"#!/usr/bin/perl\n"):
        script.write_bytes(content)
        with pytest.raises(StartCommandError, match="give the command as `PYTHON -m MODULE`"):
            read_command(["vllm", "serve", "M"], programs)
    script.write_text("#!/usr/bin/env python\n")
    assert read_command(["vllm", "serve", "M"], programs).python == Path(programs["PATH"]) / "python"
