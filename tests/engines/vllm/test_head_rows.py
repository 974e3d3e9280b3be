"""vLLM serves every head that it serves without the plugin, with the text of plain decoding, and some more."""

from __future__ import annotations

from pathlib import Path

import head_rows
import pytest
from head_rows import ROWS
from vllm_engines import accept_length, engine, generate

PROMPTS = ["tree root leaf", "the quick brown fox", "hello"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return head_rows.write_target(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> list[list[int]]:
    with engine(models[0]) as llm:
        return generate(llm, PROMPTS)


@pytest.mark.matrix  # a start of an engine each: `test_head_rules.py` has the same decisions without one
@pytest.mark.parametrize("name", ROWS)
def test_the_plugin_serves(name: str, models: tuple[Path, Path], plain: list[list[int]]) -> None:
    with engine(models[0], head_rows.write_row(name, models[1])) as llm:
        assert generate(llm, PROMPTS) == plain
        found = accept_length(llm)
        assert (found > 2.5) == ROWS[name].right, found  # trees of two levels: at most 3


@pytest.mark.matrix  # what vLLM alone does with the same heads: no line of the plugin runs
@pytest.mark.parametrize("name", ROWS)
def test_vllm_alone(name: str, models: tuple[Path, Path], plain: list[list[int]]) -> None:
    head = head_rows.write_row(name, models[1])
    if not ROWS[name].stock_vllm:
        with pytest.raises(Exception, match=r".") as failed, engine(models[0], head, chain=True):
            pass
        assert "eagle-plugin" not in str(failed.value)
        return
    with engine(models[0], head, chain=True) as llm:
        assert generate(llm, PROMPTS) == plain
        assert (accept_length(llm) > 5) == ROWS[name].right
