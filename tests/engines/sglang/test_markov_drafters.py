"""Block drafters with a Markov head (DSpark) with draft trees in SGLang on a CPU, where stock SGLang starts none.

Trees are those of the reference, greedy text is that of plain decoding, sampled text has its distribution.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import block_lists
import pytest
import torch
from bigram_models import bigram_target, spoken
from dflash_models import lend_tables
from draft_paths import paths_of
from dspark_models import dspark_head, tiny_dspark
from gtest import p_values
from penalised_greedy import PROMPTS, greedy_ids
from reference_decoder import draft_tree
from sampling_distribution import load, prompt_ids, sample
from sampling_requests import PROMPT, SETTINGS, ask, draw
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, generate, serving, tiny_spec
from sglang_block_servers import BLOCK, DSPARK, FLAGS, SHAPE, Pair, Served, served
from tiny_models import tiny_llama

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.runtime.round import Drafts

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

MATRIX = pytest.mark.matrix
LENGTH, REQUESTS = 40, 1000
LEAST_P = 1e-4 / 12  # a right verifier fails one of these tests once in 10,000 runs


def trees_of(found: Served, pair: Pair, prompt: str) -> list[bool]:
    """For each tree of an answer, one request alone, whether it is the reference's."""
    (found.folder / "lists").write_text("")
    text = prompt_ids(pair.target, prompt) + generate(found.server, prompt, LENGTH)["output_ids"]
    model, module = load(pair.target), load_any_head(pair.head, pair.target)
    greedy, key = SamplingParams.greedy(1), torch.zeros(1, dtype=torch.int64)
    results = []
    for one in block_lists.told(found.folder, text):
        shape = Shape(*one["shape"])
        with torch.no_grad():
            wanted = draft_tree(model, module, text[: one["length"] + 1], greedy, key, shape)
        results.append({tuple(path) for path in one["nodes"]} == set(paths_of(Drafts(wanted, shape), 0)))
    return results


def check_trees(pair: Pair, folder: Path, **environment: str) -> None:
    for found in served(pair, folder, kind=DSPARK, **environment):
        wanted = [greedy_ids(pair.target, prompt, LENGTH, {}) for prompt in PROMPTS]
        sampling = {"temperature": 0, "max_new_tokens": LENGTH}
        assert [answer["output_ids"] for answer in ask(found.server, PROMPTS, sampling)] == wanted
        assert "DSPARK is served by the plugin's draft trees" in found.server.log_text()
        trees = trees_of(found, pair, PROMPTS[0])
        assert len(trees) > 5 and all(trees)
        for fault in block_lists.MARKOV_FAULTS:
            block_lists.choose(found.folder, fault)
            trees = trees_of(found, pair, PROMPTS[1])
            assert len(trees) > 5 and sum(trees) < 0.7 * len(trees), fault  # those of one level or one child stay
            assert [answer["output_ids"] for answer in ask(found.server, PROMPTS, sampling)] == wanted


def random_pair(folder: Path, **options: Any) -> Pair:
    target = tiny_llama(folder / "target", head_dim=32)
    return Pair(target, tiny_dspark(folder / "head", target, block=BLOCK, **options))


def test_greedy_text_and_trees(tmp_path: Path) -> None:
    check_trees(random_pair(tmp_path / "models"), tmp_path / "server", **SYNCHRONOUS)


@MATRIX
@pytest.mark.parametrize("case", ["fill-in", "causal", "random shapes"])
def test_trees_of_other_drafters(case: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"fill-in": {"anchor": False}, "causal": {"is_causal": True}}.get(case, {})
    environment = OVERLAP if case == "random shapes" else SYNCHRONOUS
    check_trees(random_pair(tmp_path / "models", **options), tmp_path / "server", **environment)


def known_pair(folder: Path) -> Pair:
    """A drafter whose Markov head knows the target nearly, and whose layers say nothing."""
    target = bigram_target(folder / "target")
    lend_tables(target, kept := spoken(target))
    return Pair(target, dspark_head(folder / "head", target, kept, wrong=1.0, own_tables=False, block=BLOCK))


@MATRIX
def test_bfloat16(tmp_path: Path) -> None:
    """The default, with int8 copies of the drafter's weights: drafts are accepted as well."""
    target, head = known_pair(tmp_path)
    with serving([tiny_spec(target, head, SHAPE, dtype="bfloat16", **DSPARK)], tmp_path) as (server,):
        assert accept_length(ask(server, PROMPTS, {"temperature": 0, "max_new_tokens": LENGTH})) > 1.3


@MATRIX
@pytest.mark.parametrize("way", ["ahead", "captured"])
def test_a_drafter_that_knows_the_target(way: str, tmp_path: Path) -> None:
    """By its Markov head alone: drafts are accepted, greedy text and the distribution of sampled text stay, and a
    verifier that accepts every draft is found out."""
    target, head = known_pair(tmp_path)
    setting = {"temperature": 1.0}
    expected = sample(target, PROMPT, setting, 4 * REQUESTS, 4, seed=1).numpy()
    wanted = [greedy_ids(target, prompt, LENGTH, {}) for prompt in PROMPTS]
    environment = GRAPHS if way == "captured" else OVERLAP | block_lists.install(tmp_path / "fault")
    settings = SETTINGS | {"extra_flags": FLAGS, "environment": environment}
    with serving([tiny_spec(target, head, SHAPE, **settings, **DSPARK)], tmp_path) as (server,):
        answers = ask(server, PROMPTS, {"temperature": 0, "max_new_tokens": LENGTH})
        assert [answer["output_ids"] for answer in answers] == wanted
        assert accept_length(answers) > 1.3
        found = p_values(draw(server, [setting], REQUESTS)[0], expected)
        assert min(found.values()) > LEAST_P, found
        if way == "captured":
            return
        block_lists.choose(tmp_path / "fault", "every draft accepted")
        found = p_values(draw(server, [setting], REQUESTS)[0], expected)
        assert min(found.values()) < LEAST_P**2, found
