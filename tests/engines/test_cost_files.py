"""Costs of a round on disk: what is read is what was written, and nothing else is ever taken for costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_plugin.common import keyed_json
from eagle_plugin.common.atomic_io import WriteError
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.kernels import loader
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime import cost_files
from eagle_plugin.runtime.cost_files import CostFileError

COSTS = Costs(
    target=Forward(Curve.of([(1, 0.01), (8, 0.02), (64, 0.1)]), 1e-7, 1e-8),
    level=Forward(Curve.of([(1, 0.001)])),
    extend=Forward(Curve.of([(1, 0.001), (4, 0.002)]), 1e-9),
    fixed=0.002,
    levels=Levels.PARALLEL,
    prompt_token=0.0003,
    draft=0.0004,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files."""
    loader.backend()  # a library that is not open yet would be built anew in the other folder
    monkeypatch.setattr(loader, "cache_dir", lambda: tmp_path / "cache" / "kernels")
    return tmp_path / "cache" / "costs"


def key(**changes: Any) -> dict[str, Any]:
    return of_server() | changes


def of_server(context: int = 4096, cache_tokens: int = 100_000) -> dict[str, Any]:
    server = "vllm 0.32.0", "target", "head", "cpu", "float32", Shape(2, 4, 8)
    return cost_files.key_of(*server, context=context, cache_tokens=cache_tokens, blocks=16)


def test_what_is_read_is_what_was_written() -> None:
    assert cost_files.read(key()) is None
    cost_files.write(key(), COSTS)
    assert cost_files.read(key()) == COSTS
    other = COSTS._replace(fixed=0.0, levels=Levels.RECURRENT, plain=COSTS.extend)
    cost_files.write(key(), other)
    assert cost_files.read(key()) == other


@pytest.mark.parametrize("name", list(of_server()))
def test_costs_belong_to_one_key(name: str, cache: Path) -> None:
    cost_files.write(key(), COSTS)
    assert name in key() and cost_files.read(key(**{name: "another"})) is None
    # A file of another server under this one's name: copied by hand, or two keys of one digest.
    (path,) = cache.iterdir()
    keyed_json.path_of(cost_files.folder(), key(**{name: "another"})).write_bytes(path.read_bytes())
    with pytest.raises(CostFileError, match="was written for another server"):
        cost_files.read(key(**{name: "another"}))


def test_the_key_has_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(torch, "get_num_threads", lambda: before["threads"] + 1)
    assert key() != before


@pytest.mark.parametrize("switch", ["EAGLE_TARGET_LINEAR", "EAGLE_DRAFT_INT8"])
def test_the_key_has_who_computes_the_layers_of_the_models(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setenv(switch, "0")
    assert key() != before


def test_the_key_has_how_long_prefixes_can_be() -> None:
    """Of a short context nothing is known of what a token of a prefix costs; a cache is never of quite one size."""

    def path(**of: int) -> Path:
        return keyed_json.path_of(cost_files.folder(), of_server(**of))

    assert len({path(), path(context=8192), path(cache_tokens=50_000), path(cache_tokens=200_000)}) == 4
    assert path(cache_tokens=90_000) == path() and path(cache_tokens=0) != path(cache_tokens=2)


def test_the_key_has_the_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setenv("EAGLE_LOOKUP", "on")
    assert key() != before


def broken(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def damage(text: str) -> str:
        kept = json.loads(text)
        change(kept)
        return json.dumps(kept)

    return damage


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "null": lambda text: "null",
    "nested": lambda text: "[" * 5000,
    "another form": broken(lambda kept: kept.update(version=0)),
    "no version": broken(lambda kept: kept.pop("version")),
    "no key": broken(lambda kept: kept.pop("key")),
    "no costs": broken(lambda kept: kept.pop("costs")),
    "costs are text": broken(lambda kept: kept.update(costs="fast")),
    "no target": broken(lambda kept: kept["costs"].pop("target")),
    "no fixed": broken(lambda kept: kept["costs"].pop("fixed")),
    "fixed is text": broken(lambda kept: kept["costs"].update(fixed="0.1")),
    "fixed is true": broken(lambda kept: kept["costs"].update(fixed=True)),
    "fixed is not a number": broken(lambda kept: kept["costs"].update(fixed=math.nan)),
    "no kind of levels": broken(lambda kept: kept["costs"].pop("levels")),
    "the kind of levels is a number": broken(lambda kept: kept["costs"].update(levels=1)),
    "negative": broken(lambda kept: kept["costs"]["target"].update(per_key=-1e-9)),
    "infinite": broken(lambda kept: kept["costs"]["target"].update(per_key_and_row=math.inf)),
    "no points": broken(lambda kept: kept["costs"]["level"].update(seconds_by_rows=[])),
    "points of one number": broken(lambda kept: kept["costs"]["level"].update(seconds_by_rows=[[1]])),
    "no rows": broken(lambda kept: kept["costs"]["level"].update(seconds_by_rows=[[0, 0.1]])),
    "half a row": broken(lambda kept: kept["costs"]["level"].update(seconds_by_rows=[[1.5, 0.1]])),
    "no time": broken(lambda kept: kept["costs"]["level"].update(seconds_by_rows=[[1, 0.0]])),
    "not ascending": broken(lambda kept: kept["costs"]["target"]["seconds_by_rows"].reverse()),
    "twice": broken(lambda kept: kept["costs"]["level"].update(seconds_by_rows=[[1, 0.1], [1, 0.2]])),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_not_taken_for_costs(name: str, cache: Path) -> None:
    cost_files.write(key(), COSTS)
    (path,) = cache.iterdir()
    path.write_text(DAMAGES[name](path.read_text()))
    with pytest.raises(CostFileError, match="measured again") as error:
        cost_files.read(key())
    assert "\n" not in str(error.value)
    cost_files.write(key(), COSTS)
    assert cost_files.read(key()) == COSTS


def test_a_file_that_is_no_text_or_no_file(cache: Path) -> None:
    cost_files.write(key(), COSTS)
    (path,) = cache.iterdir()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostFileError, match="cannot be read"):
        cost_files.read(key())
    path.unlink()
    path.mkdir()
    with pytest.raises(CostFileError, match="cannot be read"):
        cost_files.read(key())


def test_a_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(WriteError, match="cannot write .*/cache/costs/.*; set EAGLE_CACHE_DIR to a folder"):
        cost_files.write(key(), COSTS)
    with pytest.raises(CostFileError, match="cannot be read"):  # costs are measured: not the same as none being kept
        cost_files.read(key())
