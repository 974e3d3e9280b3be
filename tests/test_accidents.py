"""Every sub-command in every accident prints one sentence and ends with an error code, never with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accident_cases import CASES, sub_commands
from accident_kinds import as_ordinary_user, full_disk
from accident_scenes import SCENES
from accidents import Workshop, open_workshop

from eagle_plugin import cli
from eagle_plugin.learning.data.generation import endpoints

# These need a download or an engine: their calls fail even if nothing is wrong with their places.
NEVER_WORK = (
    "models get",
    "models path",
    "demo",
    "serve",
    "bench",
    "bench-serving",
    "benchmark",
    "watch",
    "data collect",
)


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with open_workshop() as found:
        yield found


def test_every_sub_command_has_a_case() -> None:
    assert sub_commands() == sorted(CASES), "add the new sub-command to CASES in tests/support/accident_cases.py"


@pytest.mark.parametrize("command", CASES)
def test_an_accident_ends_in_one_sentence(command: str, workshop: Workshop, request: pytest.FixtureRequest) -> None:
    """In `make test` every second accident of a place, by turns: each has all of them where other commands meet it."""
    for outcome in workshop.run(command, by_turns="not matrix" in request.config.option.markexpr):
        what = f"{command} with {outcome.place} {outcome.accident}: {outcome.output}"
        assert outcome.code not in (None, 0) and "Traceback" not in outcome.output, what
        # A stage of `optimize` is a command of its own, with a sentence of its own.
        assert len(outcome.sentences) == 1 + (command == "optimize" and outcome.accident == "full"), what
        assert (outcome.code == 130) == (outcome.accident == "interrupted"), what
        assert not outcome.left, what
        if outcome.accident not in ("interrupted", "full"):
            assert f"/{outcome.place}" in outcome.sentences[0], what


@pytest.mark.parametrize("command", [command for command in CASES if command not in NEVER_WORK])
def test_without_an_accident_the_same_call_works(command: str, workshop: Workshop) -> None:
    # The random head of these tests fits its target and drafts nothing right.
    outcome = workshop.run_undisturbed(command, "--files-only" if command == "check" else "")
    assert outcome.code == 0 and not outcome.sentences, outcome.output


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_ends_in_one_sentence_soon(name: str, workshop: Workshop) -> None:
    outcome = workshop.run_scene(name)
    assert outcome.code not in (None, 0) and "Traceback" not in outcome.output, outcome.output
    assert len(outcome.sentences) == 1 and len(outcome.output) < 4000, outcome.output
    for part in SCENES[name].wanted:
        assert part in outcome.sentences[0], outcome.output
    assert not outcome.left and "developer.mozilla.org" not in outcome.output
    # What the scenes shorten is short enough as it is.
    assert outcome.seconds < 60 and endpoints.LISTING_S < 10  # a minute: it waits for nothing, on any machine


def test_a_killed_server_of_a_job_is_tried_twice(workshop: Workshop) -> None:
    outcome = workshop.run_scene("server killed in a job")
    assert outcome.output.count("starting the engine") == 2, outcome.output
    assert outcome.output.count("then the stage runs once more") == 1


def test_a_traceback_would_be_seen(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: list[str]) -> int:
        raise KeyError("a defect")

    monkeypatch.setattr(cli, "_run", broken)
    (outcome,) = workshop.run("models list")
    assert outcome.code is None and "Traceback" in outcome.output


def test_the_accidents_are_real(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    file.chmod(0)
    with as_ordinary_user(), pytest.raises(PermissionError):
        file.read_text()
    file.chmod(0o600)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        file.write_text("xy")
    file.write_text("xy")
    assert os.geteuid() == os.getuid()


# Ctrl-C at the moment in which `module` is looked for. The error that Python raises becomes another one, as inside the
# C++ of torch.
INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({module!r}):
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("initialisation failed") from None
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["eagle-plugin", *{args!r}]
from eagle_plugin.cli import main
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""
LOAD_TORCH = ("data vocabulary", "data features", "train", "eval", "export", "version")  # before anything else
QUICK = [("data prepare", "eagle_plugin."), ("version", "eagle_plugin."), ("train", "torch"), ("eval", "torch")]
LATE = [(command, module) for module, commands in (("eagle_plugin.", CASES), ("torch", LOAD_TORCH))
        for command in commands if (command, module) not in QUICK]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "module"), [*QUICK, *(pytest.param(*late, marks=pytest.mark.matrix) for late in LATE)]
)
def test_ctrl_c_while_modules_load(command: str, module: str, tmp_path: Path) -> None:
    filled = CASES[command].args.replace("{url}", "http://127.0.0.1:9").format_map(_Anywhere(tmp_path)).split()
    code = INTERRUPTED.format(module=module, args=[*command.split(), *filled])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


class _Anywhere(dict[str, str]):
    """A path for every name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> str:
        return str(self._folder / name)
