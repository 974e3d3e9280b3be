"""The fp32 part of the demo: do plain decoding and the plugin give the same greedy answers?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape

from eagle_plugin.bench.load import Completion, LoadError, Sampling, run_load
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.bench.spec import Mode, ServerSpec
from eagle_plugin.bench.startup import serving
from eagle_plugin.common.errors import first_line
from eagle_plugin.heads.files import HeadError, read_config, text_config

QUANTISED = "the target is quantised, and engines do not serve such a one in fp32"
UNFINISHED = "the comparison was not finished"


class Comparison(NamedTuple):
    """The ids of the questions whose answers differ, and of those to which both servers answered nothing.

    Answers are compared in every field that holds tokens: text, reasoning and tool calls. Two empty ones prove nothing.
    """

    different: list[str]
    empty: list[str]
    not_compared: str = ""  # why nothing was asked


def is_quantised(spec: ServerSpec) -> bool:
    """Whether the target's files say so, or the engine's flags."""
    if any(flag.partition("=")[0] in ("--quantization", "-q") for flag in spec.extra_flags):
        return True
    try:
        config = read_config(spec.target)
    except HeadError:
        return False
    keys = ("quantization_config", "compression_config")
    return any(part.get(key) for part in (config, text_config(config)) for key in keys)


def compare_if_served(
    specs: Mapping[Mode, ServerSpec], questions: Sequence[Question], max_tokens: int, logs: Path, steps: Steps
) -> Comparison:
    """`compare_greedy`, or why it was not made: a report of what was measured before is made without it too."""
    if is_quantised(specs["plain"]):
        steps.log(f"no comparison in fp32: {QUANTISED}")
        return Comparison([], [], QUANTISED)
    try:
        return compare_greedy(specs, questions, max_tokens, logs, steps)
    except (ServerError, LoadError) as error:
        steps.log(f"[bold red]no comparison in fp32:[/] {escape(str(error))}")
        return Comparison([], [], first_line(error))


def compare_greedy(
    specs: Mapping[Mode, ServerSpec], questions: Sequence[Question], max_tokens: int, logs: Path, steps: Steps
) -> Comparison:
    """Ask "plain" and "plugin" of `specs` in fp32, and compare their answers.

    Nothing is timed here, so both servers run at the same time, each with half of the threads, and the plugin's shapes
    are drawn at random: more of them are compared, and no costs are measured at the start.
    """
    exact: dict[Mode, ServerSpec] = {}
    for mode in ("plain", "plugin"):
        spec = specs[mode]
        threads = None if spec.threads is None else max(1, spec.threads // 2)
        environment = {"EAGLE_POLICY": "random", **spec.environment}
        exact[mode] = replace(spec, dtype="float32", threads=threads, environment=environment)
    with (
        serving(exact, logs, steps) as servers,
        steps.step(f"{len(questions)} greedy answers of {max_tokens} tokens in fp32") as step,
    ):
        done = 0

        def advance(completion: Completion) -> None:
            nonlocal done
            done += 1
            step.update(f"{done} of {2 * len(questions)} answers", done / (2 * len(questions)))

        plain, plugin = asyncio.run(_ask_both(servers, questions, Sampling(max_tokens=max_tokens), advance))
    triples = list(zip(questions, plain, plugin, strict=True))
    return Comparison(
        [question.id for question, theirs, ours in triples if theirs.output != ours.output],
        [question.id for question, theirs, ours in triples if not (theirs.output or ours.output)],
    )


async def _ask_both(
    servers: Mapping[Mode, Server],
    questions: Sequence[Question],
    sampling: Sampling,
    on_done: Callable[[Completion], None],
) -> tuple[list[Completion], list[Completion]]:
    for server in servers.values():
        server.resume()
    plain, plugin = await asyncio.gather(
        *(run_load(servers[mode].endpoint, questions, sampling, on_done=on_done) for mode in ("plain", "plugin"))
    )
    return plain, plugin
