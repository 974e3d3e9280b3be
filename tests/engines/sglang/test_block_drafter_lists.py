"""Block drafters (DFlash) in SGLang list what a computation in plain torch lists.

They know nothing, so that their lists depend on all that they read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import block_lists
import pytest
from dflash_models import tiny_dflash
from dflash_reference import DFlashReference
from family_models import sglang_target
from sampling_distribution import prompt_ids
from serving import OVERLAP, SYNCHRONOUS, accept_length, generate, generate_all, responses, serving, tiny_spec
from sglang_block_servers import BLOCK, DFLASH, SHAPE, Pair, Served, bigram_pair, served
from tiny_models import tiny_llama
from word_prompts import make_prompts

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

MATRIX = pytest.mark.matrix
LENGTH = 40
TEXT = 24
FAMILIES = ["llama", "qwen3", "qwen3_moe", "gpt_oss"]  # of the others SGLang keeps no states for block drafters


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Pair]]:
    folder = tmp_path_factory.mktemp("random")
    target = tiny_llama(folder / "target", head_dim=32)
    made = Pair(target, tiny_dflash(folder / "head", target, block=BLOCK))
    for found in served(made, tmp_path_factory.mktemp("server"), **OVERLAP):
        yield found, made


def lists_of(found: Served, made: Pair, prompt: str, near: float = 1e-3) -> list[bool]:
    (found.folder / "lists").write_text("")
    text = prompt_ids(made.target, prompt) + generate(found.server, prompt, TEXT)["output_ids"]
    return [
        drafted.is_right for drafted in block_lists.compared(found.folder, text, DFlashReference(*made), BLOCK, near)
    ]


@MATRIX
def test_lists_are_those_of_the_reference(random: tuple[Served, Pair]) -> None:
    for prompt in make_prompts(6):
        for _ in range(2):
            found = lists_of(*random, prompt)
            assert len(found) > 3 and all(found)


@MATRIX
@pytest.mark.parametrize(("number", "fault"), list(enumerate(block_lists.FAULTS)))
def test_faults_are_noticed(number: int, fault: str, random: tuple[Served, Pair]) -> None:
    """The control: each of them changes every list. The prompts are others than those in the prefix cache."""
    found, made = random
    block_lists.choose(found.folder, fault)
    try:
        lists = lists_of(found, made, f"{number} {make_prompts(30)[20 + number]}")
    finally:
        block_lists.choose(found.folder, "none")
    assert len(lists) > 3 and not any(lists)


@MATRIX
@pytest.mark.parametrize("family", FAMILIES)
def test_other_targets(family: str, tmp_path: Path) -> None:
    """Greedy text of several requests is that of plain decoding, and the lists are right."""
    target = sglang_target(tmp_path / "target", family)
    made = Pair(target, tiny_dflash(tmp_path / "head", target, block=BLOCK))
    prompts = make_prompts(8)
    with serving([tiny_spec(target)], tmp_path / "plain") as (plain,):
        expected = responses(generate_all(plain, prompts, LENGTH, at_once=4))
    for found in served(made, tmp_path / "server", **OVERLAP):
        assert responses(generate_all(found.server, prompts, LENGTH, at_once=4)) == expected
        lists = lists_of(found, made, prompts[0] + " root")
        assert len(lists) > 3 and all(lists)


@MATRIX
def test_a_causal_drafter(tmp_path: Path) -> None:
    """By `is_causal`, each row of the block sees those before it."""
    target = tiny_llama(tmp_path / "target", head_dim=32)
    made = Pair(target, tiny_dflash(tmp_path / "head", target, block=BLOCK, is_causal=True))
    for found in served(made, tmp_path / "server", **SYNCHRONOUS):
        lists = lists_of(found, made, "tree root leaf")
        assert len(lists) > 3 and all(lists)


@MATRIX
def test_bfloat16(tmp_path: Path, random: tuple[Served, Pair]) -> None:
    """The default, with int8 copies of the drafter's weights: it is right as often, and lists nearly the same."""
    pair = bigram_pair(tmp_path / "models")
    spec = tiny_spec(pair.target, pair.head, SHAPE, dtype="bfloat16", **DFLASH)
    with serving([spec], tmp_path / "pair") as (server,):
        assert accept_length(generate_all(server, make_prompts(12), LENGTH, at_once=4)) > 1.3
    _, made = random
    for found in served(made, tmp_path / "random", dtype="bfloat16", **SYNCHRONOUS):
        lists = lists_of(found, made, "tree root leaf", near=0.5)
        assert len(lists) > 3 and all(lists)
