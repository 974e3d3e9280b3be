"""A release that the plugin was not tested with, under ``EAGLE_PLUGIN=force``: served, or left to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
from future_release import make_release
from serving import VLLM_PYTHON, serving, tiny_spec, vllm_spec
from word_prompts import make_prompts

from eagle_plugin.bench.load import Sampling, ask_all
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import PLUGIN_LINE, Server
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.runtime.engine_source import EngineSource

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`"),
]


class Case(NamedTuple):
    """An engine, and a private method that a release might call otherwise."""

    installed: Path
    version: str
    file: str
    old: str
    new: str
    difference: str  # that is logged

    def release(self, folder: Path, engine: str, renamed: bool) -> Path:
        changes = {self.file: (self.old, self.new)} if renamed else {}
        return make_release(self.installed, engine, self.version, folder, changes)


CASES = {
    "sglang": Case(
        EngineSource.installed("sglang").folder,
        "0.99.0",
        "srt/speculative/eagle_worker_v2.py",
        "_forward_prefill_batch(",
        "_forward_prompts(",
        "EAGLEWorkerV2._forward_prefill_batch is gone",
    ),
    "vllm": Case(
        VLLM_PYTHON.parents[1] / "lib/python3.11/site-packages",
        "0.99.0+cpu",
        "v1/worker/gpu_model_runner.py",
        "_sample(",
        "_draw(",
        "GPUModelRunner._sample is gone",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head that both engines serve."""
    target = tiny_models.tiny_llama(tmp_path_factory.mktemp("target"), head_dim=32)
    return target, tiny_models.tiny_eagle3_head(tmp_path_factory.mktemp("head"), target)


def answers(server: Server) -> list[str]:
    questions = [Question(id=str(i), group="words", prompt=prompt) for i, prompt in enumerate(make_prompts(8))]
    done = ask_all(server.endpoint, questions, Sampling(max_tokens=32, ignore_eos=True), concurrency=4)
    return [one.output.text for one in done]


def logged(server: Server, text: str) -> list[str]:
    """The plugin's lines with this text, each once: every process of a server has a log."""
    return sorted({line for line in PLUGIN_LINE.findall(server.log_text()) if text in line})


def release_spec(engine: str, models: tuple[Path, Path], folder: Path, renamed: bool) -> ServerSpec:
    """A server of the made-up release, with or without the renamed method; `builtin` if the engine's worker serves."""
    release = CASES[engine].release(folder / "release", engine, renamed)
    spec = tiny_spec if engine == "sglang" else vllm_spec
    environment = {"PYTHONPATH": str(release), "EAGLE_PLUGIN": "force", "EAGLE_CACHE_DIR": str(folder / "cache")}
    environment["EAGLE_POLICY"] = "fixed"
    mode = "builtin" if renamed else "plugin"
    return spec(*models, (2, 1, 3), mode=mode, environment=environment, name=folder.name)


def check_served_by_the_engine(server: Server, engine: str) -> None:
    (line,) = logged(server, "untouched")
    assert "although EAGLE_PLUGIN=force" in line and CASES[engine].difference in line


@pytest.mark.matrix  # test_startup.py and test_engine_contract.py, without a server
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_release_with_a_renamed_method_is_left_to_the_engine(
    engine: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with serving([release_spec(engine, models, tmp_path, renamed=True)], tmp_path / "logs", as_users=True) as (server,):
        check_served_by_the_engine(server, engine)
        assert len(set(answers(server))) > 1


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_unknown_release_is_served(engine: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """With the texts of the engine's own worker in the release with the renamed method."""
    specs = [release_spec(engine, models, tmp_path / name, name == "renamed") for name in ("same", "renamed")]
    with serving(specs, tmp_path / "logs", as_users=True) as (served, renamed):
        (line,) = logged(served, "with which it was not tested")
        assert CASES[engine].version in line and not logged(served, "untouched")
        check_served_by_the_engine(renamed, engine)
        responses = [answers(one) for one in (served, renamed)]
        assert responses[0] == responses[1] and len(set(responses[0])) > 1
