"""Targets that draft by a prediction layer of their own (MTP, NextN): text and distribution of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import pytest
from cache_slots import check_aborted_requests
from family_draws import check_distribution
from mtp_models import mimo_target
from serving import GRAPHS, OVERLAP, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

SHAPE = (3, 8, 32)
TOKENS = 64


class Servers(NamedTuple):
    plain: Server
    plugin: Server
    folder: Path  # where the plugin's verifier can be broken (broken_verifier.py)


def drafting(target: Path, shape: tuple[int, int, int] = SHAPE, **settings: Any) -> ServerSpec:
    """As users start it: an algorithm, and no path of a draft model."""
    return tiny_spec(target, None, shape, **{"mode": "plugin", "algorithm": "NEXTN"} | settings)


@pytest.fixture(scope="module", params=[OVERLAP, pytest.param(GRAPHS, marks=pytest.mark.matrix)], ids=["", "graphs"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("mimo")
    target = mimo_target(folder / "target")
    environment = request.param | broken_verifier.install(folder / "plugins")
    flags = ("--skip-server-warmup", "--chunked-prefill-size", "64")
    specs = [tiny_spec(target), drafting(target, environment=environment, extra_flags=flags)]
    with serving(specs, folder / "logs") as (plain, plugin):
        yield Servers(plain, plugin, folder / "plugins")


def test_greedy_text_equals_plain_decoding(servers: Servers) -> None:
    prompts = make_prompts(8) + [prompt * 4 for prompt in make_prompts(4)]  # these are longer than a chunk
    expected = responses(generate_all(servers.plain, prompts, TOKENS, at_once=4))
    assert len(set(expected)) > len(prompts) * 0.8, "the target repeats itself: equality would prove little"
    for _ in range(2):  # then from the prefix cache
        answers = generate_all(servers.plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.1  # shapes are random, and some allow one token only


def test_sampled_text_has_the_distribution_of_plain_decoding(servers: Servers) -> None:
    """The control: a verifier that takes every temperature for 1."""
    check_distribution(servers.plain, servers.plugin, servers.folder, [{"temperature": 1.0}, {"temperature": 0.5}])


def test_no_slot_leaks_over_requests_with_aborts(servers: Servers) -> None:
    prompts = make_prompts(25)
    expected = responses(generate_all(servers.plain, prompts, 12, at_once=8))
    check_aborted_requests(servers.plugin, prompts, expected, 12, times=2)
