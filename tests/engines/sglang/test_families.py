"""Targets of other families than Llama in SGLang: text and distribution of plain decoding, by accepted trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import httpx
import pytest
from cache_slots import check_aborted_requests
from family_draws import check_distribution
from family_models import CHANGES, KINDS, LATENT, SPOKEN, family_head, sampling_settings, sglang_target
from serving import OVERLAP, accept_length, generate, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

SHAPE = (3, 8, 32)
TOKENS = 64  # three windows
SWA = ("gemma4_text", "gpt_oss", "llama4_text")  # whose local layers have a KV pool of their own
# In ``make test``, beside the gated delta nets of test_multimodal.py; all in ``make test-matrix``.
ALWAYS = [("gpt_oss", "eagle3")]
# Where the states of linear layers are kept at the end of prompts and answers only, no round is ahead of another. And
# SGLang keeps the inputs of their convolutions in bfloat16 unless told.
ENVIRONMENTS = {"qwen3_next": {"EAGLE_POLICY": "random", "SGLANG_MAMBA_CONV_DTYPE": "float32"}}


class Servers(NamedTuple):
    """Of one family and kind of head."""

    family: str
    plain: Server
    plugin: Server
    folder: Path  # where the plugin's verifier can be broken (broken_verifier.py)


def specs(
    folder: Path,
    family: str,
    kind: str,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    shape: tuple[int, int, int] = SHAPE,
    says: int = SPOKEN,
) -> list[ServerSpec]:
    target = sglang_target(folder / "target", family, says=says)
    head = family_head(folder / "head", target, kind, says)
    flags = ("--skip-server-warmup", *flags)
    shared = ENVIRONMENTS.get(family, OVERLAP)
    plugin: dict[str, Any] = {
        "extra_flags": (*flags, "--chunked-prefill-size", "64"),
        "environment": shared | (environment or {}),
        "algorithm": "EAGLE" if kind == "eagle2" else "EAGLE3",
    }
    return [tiny_spec(target, extra_flags=flags, environment=shared), tiny_spec(target, head, shape, **plugin)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(pair, id="-".join(pair), marks=() if pair in ALWAYS else pytest.mark.matrix)
        for pair in ((family, kind) for family in CHANGES if family not in LATENT for kind in KINDS)
    ],
)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("-".join(request.param))
    environment = broken_verifier.install(folder / "plugins")
    with serving(specs(folder, *request.param, environment=environment), folder / "logs") as (plain, plugin):
        yield Servers(request.param[0], plain, plugin, folder / "plugins")


def check_responses(plain: Server, plugin: Server, count: int) -> None:
    prompts = make_prompts(count) + [prompt * 4 for prompt in make_prompts(4)]  # these are longer than a chunk
    expected = responses(generate_all(plain, prompts, TOKENS, at_once=4))
    assert len(set(expected)) > len(prompts) * 0.8, "the target repeats itself: equality would prove little"
    for _ in range(2):  # then from the prefix cache
        answers = generate_all(plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.1  # shapes are random, and some allow one token only
    # The next turn of a conversation: its prefix are prompts and answers, which end within paths of trees.
    turns = [prompt + text + " and" for prompt, text in zip(prompts, expected, strict=True)][:12]
    assert responses(generate_all(plugin, turns, 24, at_once=8)) == responses(generate_all(plain, turns, 24, at_once=4))


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.matrix)])
def test_greedy_text_equals_plain_decoding(count: int, servers: Servers) -> None:
    check_responses(servers.plain, servers.plugin, count)


def test_sampled_text_has_the_distribution_of_plain_decoding(servers: Servers) -> None:
    """The control: a verifier that takes every temperature for 1."""
    check_distribution(servers.plain, servers.plugin, servers.folder, sampling_settings(servers.family))


def test_no_slot_leaks_over_requests_with_aborts(servers: Servers) -> None:
    prompts = make_prompts(25)
    expected = responses(generate_all(servers.plain, prompts, 12, at_once=8))
    check_aborted_requests(servers.plugin, prompts, expected, 12, times=2)


@pytest.mark.matrix
@pytest.mark.parametrize("family", SWA)
def test_freed_slots_of_sliding_windows_harm_nobody(family: str, tmp_path: Path) -> None:
    """A small cache: requests wait for slots that others' windows have left, and aborted ones give theirs back."""
    flags = ("--max-total-tokens", "1024", "--max-running-requests", "8")
    with serving(specs(tmp_path, family, "eagle3", flags), tmp_path / "logs") as (plain, plugin):
        for number in range(20):
            with pytest.raises(httpx.TimeoutException):
                body = {"text": f"leave {number}", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
                httpx.post(f"{plugin.url}/generate", json=body, timeout=0.2, trust_env=False)
        check_responses(plain, plugin, 20)
        assert generate(plugin, "a", 4)["meta_info"]["completion_tokens"] == 4


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_next"])
def test_deep_paths_of_layers_that_keep_a_state(family: str, tmp_path: Path) -> None:
    """A target that says three tokens, and trees of all three: many paths are as deep as the tree."""
    fixed = {"EAGLE_POLICY": "fixed"}
    pair = specs(tmp_path, family, "eagle3", environment=fixed, shape=(3, 3, 40), says=3)
    with serving(pair, tmp_path / "logs") as (plain, plugin):
        prompts = make_prompts(12)
        answers = generate_all(plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == responses(generate_all(plain, prompts, TOKENS, at_once=4))
        assert accept_length(answers) > 2.3
