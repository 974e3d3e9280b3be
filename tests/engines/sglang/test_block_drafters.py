"""Block drafters (DFlash) with draft trees in SGLang: what they list is what a computation in plain torch lists, greedy
text is that of plain decoding, and sampled text has its distribution.

Stock SGLang starts no server with ``--speculative-algorithm DFLASH`` on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import block_lists
import pytest
from bigram_models import bigram_target, spoken
from cache_slots import check_aborted_requests
from dflash_models import dflash_head, lend_tables, tiny_dflash
from dflash_reference import DFlashReference
from family_models import sglang_target
from gtest import p_values
from penalised_greedy import PENALTIES, PROMPTS, ask_penalised, assert_penalised_greedy_text, greedy_ids
from sampling_distribution import prompt_ids, sample
from sampling_requests import PENALISED, PROMPT, SETTINGS, ask, draw
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, generate, generate_all, responses, serving, tiny_spec
from tiny_models import tiny_llama
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

MATRIX = pytest.mark.matrix
BLOCK, SHAPE = 8, (4, 3, 12)
LENGTH, REQUESTS = 40, 1000
LEAST_P = 1e-4 / (6 * 2)  # six views of two settings: a right verifier fails one of these tests once in 10,000 runs
FLAGS = (*SETTINGS["extra_flags"], "--chunked-prefill-size", "16")
DFLASH = {"algorithm": "DFLASH", "name": "dflash"}


class Pair(NamedTuple):
    target: Path
    head: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A drafter of three layers: three levels of what the target most likely says, with noise."""
    folder = tmp_path_factory.mktemp("models")
    target = bigram_target(folder / "target")
    lend_tables(target, kept := spoken(target))
    return Pair(target, dflash_head(folder / "head", target, kept, wrong=0.03, own_tables=False, block=BLOCK))


class Served(NamedTuple):
    server: Server
    folder: Path  # of `block_lists`


def served(pair: Pair, folder: Path, **environment: str) -> Iterator[Served]:
    settings = SETTINGS | {"extra_flags": FLAGS, "environment": block_lists.install(folder) | environment}
    with serving([tiny_spec(pair.target, pair.head, SHAPE, **settings, **DFLASH)], folder) as (running,):
        yield Served(running, folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Iterator[Served]:
    """Chunks of 16 prompt tokens; rounds of random shapes, plain ones among them, and a scheduler one round ahead."""
    yield from served(pair, tmp_path_factory.mktemp("server"), **OVERLAP)


def test_greedy_text_and_lists(one: Served, pair: Pair) -> None:
    """The second time from the prefix cache; then what was listed for one request alone."""
    prompts = [*PROMPTS, *(f"{prompt} " * 12 for prompt in PROMPTS)]
    wanted = [greedy_ids(pair.target, prompt, LENGTH, {}) for prompt in prompts]
    for again in range(2):
        answers = ask(one.server, prompts, {"temperature": 0, "max_new_tokens": LENGTH})
        assert [answer["output_ids"] for answer in answers] == wanted, again
        assert accept_length(answers) > 1.3
    assert f"at most {SHAPE[0]} steps, {SHAPE[1]} children per node, {SHAPE[2]} nodes" in one.server.log_text()
    (one.folder / "lists").write_text("")
    text = prompt_ids(pair.target, prompts[-1]) + generate(one.server, prompts[-1], LENGTH)["output_ids"]
    found = block_lists.compared(one.folder, text, DFlashReference(*pair), BLOCK)
    assert len(found) > 5 and all(listed.is_right for listed in found)
