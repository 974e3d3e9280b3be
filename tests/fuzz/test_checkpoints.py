"""Checkpoints of draft heads and targets with other values and bytes: read, or refused with a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dflash_models
import pytest
import tiny_models
from changed_inputs import LONG, as_json, changed, damaged, try_inputs
from dspark_models import tiny_dspark
from hypothesis import strategies as st
from peagle_models import peagle_head

from eagle_plugin.common.errors import UserError
from eagle_plugin.heads import checkpoint, vllm_rules
from eagle_plugin.heads.block_drafter import ENGINES, block_warnings, describe_block
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.manifest import compare_target, parallel_levels, read_manifest, trained_depths


class Case(NamedTuple):
    target: Path
    head: Path
    judge: Callable[[Path, Path], None]


def judge_head(algorithm: str) -> Callable[[Path, Path], None]:
    def judge(target: Path, head: Path) -> None:
        """By the rules of both engines, as before a server starts and in `eagle-plugin check`."""
        asked: list[Callable[[], Any]] = [
            lambda: checkpoint.check_head(target, head, algorithm=algorithm),
            lambda: vllm_rules.describe_head(target, head),
            lambda: (read_head(head).quantised, read_head(head).aux_ids),
            lambda: (trained_depths(head), parallel_levels(head)),
            lambda: (manifest := read_manifest(head)) and compare_target(manifest, target, head),
        ]
        for one in asked:
            refused_or_done(one)

    return judge


def judge_block(target: Path, head: Path) -> None:
    for engine in ENGINES:
        refused_or_done(lambda engine=engine: describe_block(target, head, engine))  # type: ignore[misc]
        refused_or_done(lambda engine=engine: block_warnings(head, 7, engine))  # type: ignore[misc]


def refused_or_done(attempt: Callable[[], Any]) -> None:
    """Anything but a `UserError` is a fault."""
    try:
        attempt()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 4000, str(error)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("checkpoints")
    target = tiny_models.markov_target(folder / "target")
    kept = sorted(set(tiny_models.read_markov_map(target).tolist()))
    found = {
        "EAGLE-3": Case(
            target, tiny_models.markov_eagle3_head(folder / "eagle3", target, reduced=True), judge_head("EAGLE3")
        ),
        "EAGLE-2": Case(target, tiny_models.markov_eagle2_head(folder / "eagle2", target), judge_head("EAGLE")),
        "P-EAGLE": Case(target, peagle_head(folder / "peagle", target, kept), judge_head("EAGLE3")),
    }
    other = tiny_models.tiny_llama(folder / "other")
    found["block drafter"] = Case(other, dflash_models.tiny_dflash(folder / "block", other), judge_block)
    found["Markov head"] = Case(other, tiny_dspark(folder / "markov", other), judge_block)
    record = {"format": 1, "kind": "eagle3", "aux_layers": [1, 2, 3], "target": {"config": "0" * 64}}
    record["training"] = {"recipe": {"phases": [{"steps": 3}]}}
    for case in found.values():
        (case.head / "eagle_plugin.json").write_text(json.dumps(record))
    return found


KINDS = ["EAGLE-3", "EAGLE-2", "P-EAGLE", "block drafter", "Markov head"]


@LONG
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["config.json", "eagle_plugin.json", "the target's config.json"])
def test_documents(file: str, kind: str, long: bool, cases: dict[str, Case], tmp_path: Path) -> None:
    target, head, judge = cases[kind]
    copies = [shutil.copytree(folder, tmp_path / name) for folder, name in ((target, "target"), (head, "head"))]
    place = copies[0] / "config.json" if file.startswith("the target") else copies[1] / file
    written = place.read_bytes()

    def attempt(content: bytes) -> None:
        place.write_bytes(content)
        judge(*copies)

    documents = changed(json.loads(written)).map(as_json)
    try_inputs(st.one_of(documents, documents, damaged(written)), attempt, long)


@LONG
@pytest.mark.parametrize("kind", KINDS)
def test_headers_of_weights(kind: str, long: bool, cases: dict[str, Case], tmp_path: Path) -> None:
    """A header of safetensors: eight bytes that say how long it is, then JSON."""
    target, head, judge = cases[kind]
    copy = shutil.copytree(head, tmp_path / "head")
    place = copy / "model.safetensors"
    written = place.read_bytes()
    length = int.from_bytes(written[:8], "little")
    header, rest = json.loads(written[8 : 8 + length]), written[8 + length :]

    def attempt(content: bytes) -> None:
        place.write_bytes(content)
        judge(target, copy)

    def framed(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + rest

    documents = changed(header).map(as_json).map(framed)
    try_inputs(st.one_of(documents, documents, damaged(written[: 8 + length]).map(lambda x: x + rest)), attempt, long)
