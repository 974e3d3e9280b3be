"""Targets that draft by an MTP (NextN) layer of their own: text and distribution of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import host_waits
import httpx
import mtp_models
import pytest
from cache_slots import check_aborted_requests
from family_draws import check_distribution, check_draws
from family_models import sampling_settings
from mtp_models import mtp_target
from real_torchvision import link_torchvision
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

SHAPE = (3, 8, 32)
TOKENS = 64


WARM = ("--skip-server-warmup",)
# As in test_families.py and test_multimodal.py.
HYBRID = {"EAGLE_POLICY": "random", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
PICTURES = (*WARM, "--enable-multimodal", "--max-mamba-cache-size", "64")
FAMILIES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "mimo": (OVERLAP, WARM),
    "mimo, captured": (GRAPHS | {"EAGLE_SELFTEST": "1"}, WARM),  # a difference would leave it to SGLang's own worker
    "qwen3_next": (HYBRID, WARM),
    "qwen3_5": (HYBRID, PICTURES),
    "qwen3_5_moe": (HYBRID, PICTURES),
    "glm4_moe": (OVERLAP, WARM),
    "qwen3_moe": (OVERLAP, WARM),
}
ALWAYS = ("mimo",)
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # as in test_tensor_parallel.py


class Servers(NamedTuple):
    family: str
    plain: Server
    plugin: Server
    folder: Path  # where the plugin's verifier can be broken (broken_verifier.py)


# So that greedy text depends on more than the token before.
mimo_target = partial(mtp_models.mimo_target, noise=0.05)


def make_target(folder: Path, family: str) -> Path:
    return mimo_target(folder) if family.startswith("mimo") else mtp_target(folder, family)


def drafting(target: Path, shape: tuple[int, int, int] = SHAPE, **settings: Any) -> ServerSpec:
    """As users start it: an algorithm, and no path of a draft model."""
    return tiny_spec(target, None, shape, **{"mode": "plugin", "algorithm": "NEXTN"} | settings)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.matrix) for name in FAMILIES],
)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    family = request.param
    folder = tmp_path_factory.mktemp(family.split(",")[0])
    target = make_target(folder / "target", family)
    shared, flags = FAMILIES[family]
    environment = shared | broken_verifier.install(folder / "plugins")
    chunks = ("--chunked-prefill-size", "64")
    specs = [
        tiny_spec(target, environment=shared, extra_flags=flags),
        drafting(target, environment=environment, extra_flags=(*flags, *chunks)),
    ]
    modules = link_torchvision(folder / "torchvision") if "--enable-multimodal" in flags else ""
    with serving(specs, folder / "logs", first_path=modules) as (plain, plugin):
        yield Servers(family, plain, plugin, folder / "plugins")


def test_greedy_text_equals_plain_decoding(servers: Servers) -> None:
    prompts = make_prompts(8) + [prompt * 4 for prompt in make_prompts(4)]  # these are longer than a chunk
    expected = responses(generate_all(servers.plain, prompts, TOKENS, at_once=4))
    assert len(set(expected)) > len(prompts) * 0.8, "the target repeats itself: equality would prove little"
    for _ in range(2):  # then from the prefix cache
        answers = generate_all(servers.plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.1  # shapes are random, and some allow one token only


def test_sampled_text_has_the_distribution_of_plain_decoding(servers: Servers) -> None:
    """The control: a verifier that takes every temperature for 1; what is captured does not see it."""
    settings = sampling_settings(servers.family)
    if servers.family.endswith("captured"):
        check_draws(servers.plain, servers.plugin, settings)
    else:
        check_distribution(servers.plain, servers.plugin, servers.folder, settings)


def test_no_slot_leaks_over_requests_with_aborts(servers: Servers) -> None:
    prompts = make_prompts(12)
    expected = responses(generate_all(servers.plain, prompts, 12, at_once=8))
    check_aborted_requests(servers.plugin, prompts, expected, 12, times=2)


def rounds(server: Server, prompts: list[str]) -> tuple[list[str], list[int]]:
    """Texts, and how many tokens and rounds each took."""
    answers = generate_all(server, prompts, TOKENS, at_once=4)
    return responses(answers), [answer["meta_info"]["spec_verify_ct"] for answer in answers]


def test_a_chain_is_drafted_as_by_sglangs_own_worker(tmp_path: Path) -> None:
    """Then every answer takes as many rounds: the layer has read the same tokens, states and keys."""
    target = mimo_target(tmp_path / "target")
    chain = drafting(target, (4, 1, 5), environment=SYNCHRONOUS)
    with serving([chain, replace(chain, mode="builtin")], tmp_path / "logs") as (plugin, builtin):
        prompts = make_prompts(12)
        ours = rounds(plugin, prompts)
        assert ours == rounds(builtin, prompts)
        assert len(set(ours[1])) > 4, "all answers take as many rounds: equality would prove little"


@pytest.mark.matrix
def test_no_round_waits_for_the_device(tmp_path: Path) -> None:
    """As in test_host_waits.py, which has the control."""
    environment = host_waits.install(tmp_path / "waits") | OVERLAP
    with serving([drafting(mimo_target(tmp_path / "target"), environment=environment)], tmp_path / "logs") as (server,):
        for temperature in (0, 1):
            generate_all(server, make_prompts(8), TOKENS, at_once=4, temperature=temperature)
    report = json.loads(Path(environment["EAGLE_TEST_WAITS"]).read_text())
    assert report["rounds"]["greedy"] >= 10 and report["rounds"]["sampled"] >= 10
    assert report["findings"] == {}


@pytest.mark.matrix
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    target = mtp_target(tmp_path / "target", "glm4_moe")
    two = drafting(target, environment=OVERLAP | TWO_RANKS, extra_flags=(*WARM, "--tp-size", "2"))
    with serving([tiny_spec(target), two], tmp_path / "logs") as (plain, plugin):
        prompts = make_prompts(8)
        answers = generate_all(plugin, prompts, TOKENS, at_once=4)
        assert responses(answers) == responses(generate_all(plain, prompts, TOKENS, at_once=4))
        assert accept_length(answers) > 1.1


@pytest.mark.matrix
def test_new_weights_of_the_target_bring_the_layer_along(tmp_path: Path) -> None:
    one, other = (mimo_target(tmp_path / str(seed), seed=seed) for seed in (11, 12))
    with serving([drafting(one, environment=SYNCHRONOUS)], tmp_path / "logs") as (server,):
        before = accept_length(generate_all(server, make_prompts(8), TOKENS, at_once=4))
        body = {"model_path": str(other)}
        answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200
        answers = generate_all(server, make_prompts(8), TOKENS, at_once=4)
        assert accept_length(answers) > (1 + before) / 2
    with serving([tiny_spec(other)], tmp_path / "plain") as (plain,):
        assert responses(answers) == responses(generate_all(plain, make_prompts(8), TOKENS, at_once=4))


@pytest.mark.matrix
def test_int8_copies_of_the_layer_draft_as_well(tmp_path: Path) -> None:
    target = mimo_target(tmp_path / "target")
    specs = [drafting(target, environment=SYNCHRONOUS, dtype=dtype) for dtype in ("float32", "bfloat16")]
    with serving(specs, tmp_path / "logs") as servers:
        found = [accept_length(generate_all(server, make_prompts(16), TOKENS, at_once=4)) for server in servers]
    assert found[1] == pytest.approx(found[0], abs=0.3) and found[1] > 1.5
