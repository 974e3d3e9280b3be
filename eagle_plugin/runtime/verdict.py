"""What an engine's own process finds about a start command, and how it tells `eagle-plugin doctor`.

The engine half runs in the environment of the command, as the command would: it reads the flags with the engine's own
parser, lets the engine resolve them, and asks what a server asks. Nothing is loaded and no port is opened.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import eagle_plugin
from eagle_plugin.common.allow_list import ALLOW_LISTS, ENTRY_POINT
from eagle_plugin.common.errors import UserError, first_line
from eagle_plugin.common.installed import install_command
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.runtime.startup import SWITCH, switched_off

Serves = Literal["plugin", "engine", "plain", "nobody"]
NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
GROUPS = {"sglang": "sglang.srt.plugins", "vllm": "vllm.general_plugins"}
_NO_REPOSITORY = re.compile(r"Repo id must .*?: '(.+?)'")
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_PREFIX = re.compile(r"^eagle-plugin( \S+)?: ")


class CommandRefused(UserError):
    """The command would not start a server."""


@dataclass(frozen=True)
class Cost:
    """Memory that one thing takes."""

    what: str
    bytes: int | None  # None: only the start can say
    note: str = ""


@dataclass
class Verdict:
    """Who would serve a start command, and why."""

    engine: str  # SGLang or vLLM
    version: str
    serves: Serves
    sentence: str  # the line that the server would log, or end with
    reasons: list[str] = field(default_factory=list)  # why the plugin's worker would not serve, one sentence for each
    warnings: list[str] = field(default_factory=list)  # of the plugin, that the server would log as well
    changes: list[str] = field(default_factory=list)  # what to change
    memory: list[Cost] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # what only the start itself decides
    plugin: str = ""  # its version, and whether the engine loads it

    @classmethod
    def read(cls, text: str) -> Verdict:
        """A verdict that `answer` printed."""
        values = json.loads(text)
        return cls(**{**values, "memory": [Cost(**cost) for cost in values["memory"]]})


class LogLines(logging.Filter):
    """Keeps what the plugin logs, from the level INFO on; a filter, because vLLM takes handlers away later."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger.setLevel(logging.INFO)
        logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True


@contextlib.contextmanager
def parsing(engine: str) -> Iterator[None]:
    """Within this block the engine's argparse may end the process: raises CommandRefused with its last line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            yield
    except SystemExit as end:
        if not end.code:
            raise CommandRefused(
                f"{NAMES[engine]} prints help or a list for these flags and starts no server"
            ) from None
        lines = [line for line in errors.getvalue().splitlines() if line.strip()] or [str(end.code)]
        raise CommandRefused(
            f"{NAMES[engine]} does not take the flags: {lines[-1].partition('error: ')[2] or lines[-1]}"
        ) from None


def not_loaded(engine: str) -> tuple[str, str] | None:
    """Why the engine would not load the plugin at all, and what to change; None where it would."""
    if not [found for found in metadata.entry_points(group=GROUPS[engine]) if found.name == ENTRY_POINT]:
        return (
            f"eagle-plugin is not installed as a plugin of {NAMES[engine]} for {sys.executable}: the group "
            f"{GROUPS[engine]} has no entry point {ENTRY_POINT}",
            install_command(python=sys.executable),
        )
    allowed = ALLOW_LISTS[engine]
    if allowed.drops():
        return allowed.sentence(), f"{allowed.repaired()}, or unset it"
    return None


def changes_for(reasons: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """What to change so that the plugin serves, of reasons that begin with a flag; arguments: those of the user."""
    given = {argument.partition("=")[0] for argument in arguments}
    changes = []
    for reason in reasons:
        if flag := _FLAG.match(reason):
            what = "leave out" if flag[0] in given else "set another value than the engine's own choice with"
            changes.append(f"{what} {flag[0]}" + (", or give it a value that is served" if flag[0] in given else ""))
    return list(dict.fromkeys(changes))


def without_prefix(line: str) -> str:
    """A line of ours without the name and version of the plugin."""
    return _PREFIX.sub("", line)


def fault_of(error: BaseException) -> str:
    """One sentence of what an engine raised; pydantic's first line is only a count."""
    with contextlib.suppress(Exception):
        found: Any = error
        return str(found.errors()[0]["msg"]).removeprefix("Value error, ")
    if missing := _NO_REPOSITORY.match(str(error)):  # of the hub's library, for every path that is not there
        return f"{missing[1]} is no folder on this disk, and no name of a model hub either"
    if str(error).strip():
        return first_line(error)
    last = traceback.extract_tb(error.__traceback__)[-1]  # such as an assertion without a sentence
    return f"{type(error).__name__} in {last.name} ({Path(last.filename).name}, line {last.lineno}): {last.line}"


def answer(engine: str, version: str, logger: str, judge: Callable[[list[str], LogLines], Verdict]) -> None:
    """Read the arguments of a command from standard input; the last line of standard output is the verdict.

    logger: that of the plugin in this engine.
    """
    arguments, lines = json.load(sys.stdin), LogLines(logging.getLogger(logger))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            verdict = judge(arguments, lines)
    except SystemExit as end:  # the plugin's own, with its sentence, or the engine's
        verdict = Verdict(NAMES[engine], version, "nobody", str(end.code))
    except UserError as error:
        verdict = Verdict(NAMES[engine], version, "nobody", str(error))
    except Exception as error:  # what an engine raises for flags that it does not take has every type
        verdict = Verdict(NAMES[engine], version, "nobody", f"{NAMES[engine]} does not start: {fault_of(error)}")
    if verdict.serves == "nobody":
        verdict.warnings = [without_prefix(line) for line in lines.lines]
    missing = not_loaded(engine)
    loaded = missing[0] if missing else f"{NAMES[engine]} loads it"
    switch = f"{SWITCH}={os.environ[SWITCH]}" if SWITCH in os.environ else f"{SWITCH} is not set"
    verdict.plugin = f"eagle-plugin {eagle_plugin.__version__}: {loaded}; {switch}"
    if switched_off() and verdict.serves == "engine":
        verdict.changes = [f"unset {SWITCH}"]
    print(without_credentials(json.dumps(asdict(verdict))), flush=True)
