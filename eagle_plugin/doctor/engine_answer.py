"""Asks the engine of a start command, in that command's own environment, who would serve."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.installed import install_command
from eagle_plugin.doctor.start_command import StartCommand
from eagle_plugin.runtime.verdict import NAMES, Verdict

SECONDS = 900.0  # an engine is imported, and native kernels may have to be built
# Without the current folder, which an installed program does not look in either.
# The engine first: where neither is installed, there is nothing that could serve without the plugin.
CODE = (
    "import importlib.util, sys; sys.path = [p for p in sys.path if p]; importlib.util.find_spec({0!r}) or "
    "sys.exit(\"No module named '{0}'\"); from eagle_plugin.{0}.doctor import main; main()"
)
MISSING = re.compile(r"No (?:module named|package metadata was found for) '?([\w.-]+)")


class AnswerError(UserError):
    """The engine's half gave no answer."""


def ask(command: StartCommand, base: Mapping[str, str] = os.environ) -> Verdict:
    """The verdict of the engine's half; another process, so that the user's own environment decides.

    Raises:
        AnswerError: the engine is not installed there, or its half ended without an answer.
    """
    try:
        done = subprocess.run(
            [str(command.python), "-c", CODE.format(command.engine)],
            input=json.dumps(command.arguments),
            env=dict(base) | command.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AnswerError(f"{NAMES[command.engine]} has not read its flags within {SECONDS:.0f} s") from None
    lines = done.stdout.splitlines()
    if not done.returncode and lines:
        verdict = Verdict.read(lines[-1])
        verdict.warnings += _warnings(command, base)
        return verdict
    return _without_answer(command, done.stderr.splitlines() or [f"exit code {done.returncode}"])


def _warnings(command: StartCommand, base: Mapping[str, str]) -> list[str]:
    """What the start would lack that the engine's parser does not look at."""
    args, variable = command.arguments, "SGLANG_USE_CPU_ENGINE"
    on_cpu = "--device=cpu" in args or ("--device", "cpu") in zip(args, args[1:], strict=False)
    if command.engine != "sglang" or not on_cpu or (dict(base) | command.environment).get(variable) == "1":
        return []
    return [f"--device cpu without {variable}=1 in the environment: SGLang does not take the CPU for its device then"]


def _without_answer(command: StartCommand, errors: list[str]) -> Verdict:
    name, python = NAMES[command.engine], command.python
    missing = MISSING.search(errors[-1])
    package = missing[1] if missing else ""
    if package == "eagle_plugin":
        change = install_command(python=str(python))
        sentence = f"eagle-plugin is not installed for {python}, so that {name} serves without it"
        return Verdict(name, "", "engine", sentence, changes=[change], plugin="not installed")
    if package.startswith("eagle_plugin."):
        raise AnswerError(f"the eagle-plugin of {python} is older than this command; upgrade it there")
    if package:
        raise AnswerError(f"{python} has no Python package {package}, so that it cannot start {name}; install it there")
    raise AnswerError(f"{name} cannot be asked in {python}: {errors[-1]}")
