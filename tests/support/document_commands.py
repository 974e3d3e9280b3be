"""The commands in documents: found in their code blocks, and read by the parsers of the commands that they name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("", "sh", "bash", "console")  # languages of blocks that may hold commands
FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\s*$")
OUTPUT = re.compile(r"^eagle-plugin \d+\.\d+\.\d+:|^eagle-plugin:")  # a line of a server's log
EXPORT = re.compile(r"^export (\w+)=(\S+)", re.MULTILINE)
OURS = ("eagle-plugin", "make", "python", "pytest")
SCRIPTS = ("benchmarks/", "tests/", "tools/")


@dataclass
class Part:
    """A part of a document: a code block, or (language None) the text between two of them."""

    language: str | None = None
    title: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def parts_of(document: str) -> list[Part]:
    """The text and the code blocks of a document, in their order."""
    parts = [Part()]
    for line in document.splitlines():
        if fence := FENCE.match(line):
            is_end = parts[-1].language is not None
            parts.append(Part() if is_end else Part(fence["language"], fence["title"] or ""))
        else:
            parts[-1].lines.append(line)
    return parts


def commands_of(document: str) -> Iterator[list[str]]:
    """Name and arguments of every command of OURS in the shell blocks, with the values that the document exports."""
    blocks = [part.text for part in parts_of(document) if part.language in SHELL]
    values = {name: value for block in blocks for name, value in EXPORT.findall(block)}
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if not OUTPUT.match(line) and re.search(rf"\b({'|'.join(OURS)})\b", line):
                yield from (args for args in _simple_commands(line, values) if args[0] in OURS)


def _simple_commands(line: str, values: Mapping[str, str]) -> Iterator[list[str]]:
    """The commands of a line, without comments, redirections and the variables set before them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.commenters = "#"
    lexer.whitespace_split = True
    args: list[str] = []
    try:
        for arg in lexer:
            if set(arg) <= set(";|&"):
                yield from _named(args, values)
                args = []
            else:
                args.append(arg)
    except ValueError:  # a quotation over several lines: no command of ours has one
        return
    yield from _named(args, values)


def _named(args: list[str], values: Mapping[str, str]) -> Iterator[list[str]]:
    while args and re.match(r"\w+=", args[0]):
        args = args[1:]
    if args:
        yield [re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], "/value"), arg) for arg in args]


def faults_of(args: list[str]) -> list[str]:
    """What is wrong with a command of OURS, by its own parser; empty if nothing is."""
    name, *rest = args
    if name == "eagle-plugin":
        return _refusal(args, lambda: parsers().run_command(rest))
    if name == "make":
        return _make_faults(rest)
    script = rest[0] if rest else ""
    if name == "python" and script.startswith(SCRIPTS):
        return _script_faults(script, rest[1:])
    if name == "pytest":
        paths = [arg.partition("::")[0] for arg in rest if arg.startswith("tests/")]
        return [f"{path} is not there" for path in paths if not (ROOT / path).exists()]
    return []


def parsers() -> object:
    """The module tools/command_help.py."""
    if "command_help" not in sys.modules:
        spec = importlib.util.spec_from_file_location("command_help", ROOT / "tools/command_help.py")
        assert spec is not None and spec.loader is not None
        sys.modules["command_help"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["command_help"])
    return sys.modules["command_help"]


def _refusal(args: list[str], run: object) -> list[str]:
    """The message with which the parser of this command refuses it."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser = parsers().stopped_at_parsing(run, parse=True)
        except SystemExit as end:  # 0: --help
            return [] if not end.code else [f"{shlex.join(args)}: {printed.getvalue().strip().splitlines()[-1]}"]
    return [] if parser is not None else [f"{shlex.join(args)}: it has no parser"]


def _script_faults(script: str, args: list[str]) -> list[str]:
    path = ROOT / script
    if not path.is_file():
        return [f"{script} is not there"]
    if not script.startswith("benchmarks/"):
        return []

    if "ArgumentParser" not in path.read_text("utf-8") and "command" not in path.read_text("utf-8"):
        return [f"{script} has no options of its own"] if args else []
    with (
        mock.patch.object(sys, "argv", [script, *args]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        mock.patch.dict(os.environ),
    ):
        return _refusal(["python", script, *args], lambda: _run_script(script, args))


def _run_script(script: str, args: list[str]) -> None:
    """Import a script, which may run its command at once, and call its `main`.

    It is not run as __main__: there one of them replaces its process to set variables of the memory allocator.
    """
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    required = [one for one in inspect.signature(module.main).parameters.values() if one.default is one.empty]
    module.main(*([args, *[None] * (len(required) - 1)] if required else []))


def _make_faults(args: list[str]) -> list[str]:
    """Targets and variables that the Makefile does not have, and what the command behind a target refuses of ARGS."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    given = dict(arg.split("=", 1) for arg in args if "=" in arg)
    targets = [arg for arg in args if "=" not in arg]
    faults = [f"make has no variable {name}" for name in given if not re.search(rf"\b{name}\b", makefile)]
    for target in targets:
        recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
        if recipe is None:
            faults.append(f"make has no target {target}")
        elif "ARGS" in given and (behind := _behind(recipe[1], given)):
            faults += faults_of(behind)
    return faults


def _behind(recipe: str, given: Mapping[str, str]) -> list[str]:
    """The command of a recipe to which ARGS is passed; empty if it is none of ours."""
    found = re.search(r"(eagle-plugin|benchmarks/\S+\.py)\b(.*\$\(ARGS\).*)", recipe)
    if found is None:
        return []
    values = {"ENGINE": "sglang", **given}
    args = shlex.split(re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], "value"), found[2]))
    return [found[1], *args] if found[1] == "eagle-plugin" else ["python", found[1], *args]


def tracked_documents() -> list[str]:
    """The Markdown files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()
