"""The verdict of `eagle-plugin doctor` is what the started server of the same command says."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from serving import SYNCHRONOUS, VLLM_PYTHON, serving, tiny_spec, vllm_spec
from tiny_models import tiny_eagle3_head, tiny_llama

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.servers import child_environment
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.doctor.engine_answer import ask
from eagle_plugin.doctor.start_command import StartCommand, read_command
from eagle_plugin.runtime.verdict import Verdict

# What the engine's own worker serves on a CPU, and ours does not.
LEFT = {
    "sglang": ("--speculative-accept-threshold-single", "0.9"),
    "vllm": ("--dtype", "float32", "--kv-cache-dtype", "bfloat16"),
}
ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"eagle-plugin( [\d.]+)?: ")
ON = {"EAGLE_PLUGIN": "1"}  # although the bench asks for the engine's own worker


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """vLLM's attention on a CPU wants heads of at least 32 dimensions."""
    target = tiny_llama(tmp_path_factory.mktemp("target"), head_dim=32)
    return target, tiny_eagle3_head(tmp_path_factory.mktemp("head"), target)


def make_spec(engine: str, target: Path, head: Path, **changes: object) -> ServerSpec:
    if engine == "vllm" and not VLLM_PYTHON.exists():
        pytest.skip("there is no .venv-vllm; make it with `make env-vllm`")
    make = vllm_spec if engine == "vllm" else tiny_spec
    # Of this checkout alone: the paths of this environment hold another transformers.
    own = {"PYTHONPATH": str(ROOT)} if engine == "vllm" else {}
    environment = {**SYNCHRONOUS, **own, **changes.pop("environment", {})}  # type: ignore[dict-item]
    return make(target, head, environment=environment, **changes)  # type: ignore[arg-type]


def verdict(spec: ServerSpec) -> tuple[StartCommand, Verdict]:
    """Of the command that starts this server, word for word, in the environment of the server."""
    command = read_command(ENGINES[spec.engine].command(spec, 1))
    return command, ask(command, child_environment(spec, os.environ))


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_command_that_is_served(engine: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    spec = make_spec(engine, *models)
    command, found = verdict(spec)
    assert command.engine == engine and found.serves == "plugin", found
    with serving([spec], tmp_path, as_users=True) as (server,):
        assert found.sentence in server.log_text()


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_command_that_is_left_to_the_engine(engine: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"mode": "builtin", "environment": ON, "extra_flags": LEFT[engine], "shape": (2, 1, 3)}
    spec = make_spec(engine, *models, **options)
    _, found = verdict(spec)
    assert found.serves == "engine" and found.reasons, found
    with serving([spec], tmp_path, as_users=True) as (server,):
        assert found.sentence in server.log_text()


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_list_of_plugins_without_us(engine: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """The server says nothing, and serves without us: the fault that doctor is for."""
    listed = {"sglang": {"SGLANG_PLUGINS": "eagle_sglang_cpu"}, "vllm": {"VLLM_PLUGINS": "other"}}[engine]
    spec = make_spec(engine, *models, mode="builtin", environment=ON | listed, shape=(2, 1, 3), extra_flags=())
    _, found = verdict(spec)
    assert found.serves == "engine" and found.sentence.startswith(next(iter(listed)))
    with serving([spec], tmp_path, as_users=True) as (server,):
        assert not LINE.search(server.log_text())


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_command_that_ends_the_start(engine: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    target, head = models
    wrong = shutil.copytree(head, tmp_path / "wrong")
    shutil.copy(target / "config.json", wrong / "config.json")
    spec = make_spec(engine, target, wrong)
    _, found = verdict(spec)
    assert found.serves == "nobody", found
    with pytest.raises(Exception, match="ended with exit code"), serving([spec], tmp_path / "logs", as_users=True):
        pass
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
    assert found.sentence in logs
