"""Reads a user's start command: which engine it starts, in which environment, with which flags."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.common.errors import UserError

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"(python|pypy)[0-9.]*")
# Programs that run the arguments after their own options as a command.
WRAPPERS = ("env", "exec", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time")
# Modules that start a server: the engine, and whether `serve` comes before the flags.
MODULES = {
    "sglang.launch_server": ("sglang", False),
    "sglang": ("sglang", True),
    "sglang.cli.main": ("sglang", True),
    "vllm.entrypoints.cli.main": ("vllm", True),
    "vllm.entrypoints.openai.api_server": ("vllm", False),
}
WANTED = (
    "wanted `vllm serve ...`, `sglang serve ...`, `python -m sglang.launch_server ...` or "
    "`python -m vllm.entrypoints.openai.api_server ...`, with NAME=VALUE before it for its environment"
)


class StartCommandError(UserError):
    """The arguments are no start command of a server."""


class StartCommand(NamedTuple):
    """A start command as the engine's half reads it."""

    engine: str  # sglang or vllm
    python: Path  # the interpreter that would run it
    arguments: list[str]
    environment: dict[str, str]  # that the command sets


def read_command(args: Sequence[str], base: Mapping[str, str] = os.environ) -> StartCommand:
    """The start command in these arguments, or in one argument with the whole line; base: the environment of its shell.

    Raises:
        StartCommandError: they start no server of an engine, or a program is not there.
    """
    args = _split(args)
    environment: dict[str, str] = {}
    args = _skip_wrappers(args, environment)
    if not args:
        raise StartCommandError(f"the command sets an environment and starts nothing; {WANTED}")
    program, *rest = args
    name = Path(program).name
    if name in ("vllm", "sglang"):
        return StartCommand(name, _interpreter(program, {**base, **environment}), _flags(name, True, rest), environment)
    if PYTHON.fullmatch(name):
        module, rest = _module(rest)
        if module in MODULES:
            engine, has_verb = MODULES[module]
            python = Path(_found(program, {**base, **environment}))
            return StartCommand(engine, python, _flags(engine, has_verb, rest), environment)
        program = f"{program} -m {module}" if module else f"{program} without -m"
    raise StartCommandError(f"the command starts {program!r}; {WANTED}")


def _split(args: Sequence[str]) -> list[str]:
    if len(args) != 1 or not any(letter.isspace() for letter in args[0]):
        return list(args)
    try:
        return shlex.split(args[0])
    except ValueError as error:
        raise StartCommandError(f"the command cannot be split into arguments ({error}); close its quotes") from error


def _skip_wrappers(args: list[str], environment: dict[str, str]) -> list[str]:
    """The arguments from the program on; what those before it set is put into `environment`."""
    while args:
        if ASSIGNMENT.match(args[0]):
            name, _, environment[name] = args[0].partition("=")
        elif args[0] not in WRAPPERS:
            return args
        else:  # its options, up to an assignment or a program that we know
            while len(args) > 1 and not (ASSIGNMENT.match(args[1]) or _is_known(args[1])):
                args = args[1:]
        args = args[1:]
    return args


def _is_known(word: str) -> bool:
    name = Path(word).name
    return name in ("vllm", "sglang", *WRAPPERS) or PYTHON.fullmatch(name) is not None


def _module(args: list[str]) -> tuple[str, list[str]]:
    """The module of `python -m`, and the arguments after it."""
    for number, word in enumerate(args):
        if word == "-m" and number + 1 < len(args):
            return args[number + 1], args[number + 2 :]
        if not word.startswith("-"):
            break
    return "", args


def _flags(engine: str, has_verb: bool, args: list[str]) -> list[str]:
    """What the engine's parser of a server gets; for vLLM's command that includes `serve`."""
    if not has_verb:
        return args
    if args[:1] != ["serve"]:
        found = f"`{engine} {args[0]}`" if args else f"`{engine}`"
        raise StartCommandError(f"the command is {found}, which starts no server; {WANTED}")
    if engine == "vllm":
        return args
    flags = args[1:]
    for form in (["--model-type", "llm"], ["--model-type=llm"], ["--model-type", "auto"], ["--model-type=auto"]):
        for at in range(len(flags) - len(form) + 1):
            if flags[at : at + len(form)] == form:  # read by `sglang serve` itself
                flags = flags[:at] + flags[at + len(form) :]
                break
    return ["--model-path", *flags] if flags and not flags[0].startswith("-") else flags


def _found(program: str, environment: Mapping[str, str]) -> str:
    path = shutil.which(os.path.expanduser(program), path=environment.get("PATH"))
    if path is None:
        raise StartCommandError(
            f"the program {program!r} is not in PATH; activate the environment of the engine, or give its path"
        )
    return path


def _interpreter(program: str, environment: Mapping[str, str]) -> Path:
    """The interpreter that a console script names in its first lines."""
    script = Path(_found(program, environment))
    try:
        first, *more = script.read_text(encoding="utf-8").splitlines()[:3]
    except (OSError, UnicodeDecodeError, ValueError):
        first, more = "", []
    if first.startswith("#!"):
        args = first[2:].split()
        if args and Path(args[-1]).name in ("sh", "bash") and more:  # a path with spaces, or too long for the kernel
            args = re.findall(r"""exec['"]* +["']([^"']+)["']""", more[0])
        if len(args) == 2 and Path(args[0]).name == "env":
            args = [_found(args[1], environment)]
        if args and PYTHON.fullmatch(Path(args[0]).name):
            return Path(args[0])
    raise StartCommandError(
        f"{script} is no Python program with the path of its interpreter in its first line; give the command as "
        "`PYTHON -m MODULE`"
    )
