"""Targets of multimodal classes in SGLang: prompts of text, and with pictures, get the text of plain decoding."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import httpx
import pytest
from cache_slots import check_aborted_requests
from family_draws import check_distribution
from family_models import family_head, sampling_settings
from mtp_models import mtp_target
from multimodal_models import KINDS, PLACES, multimodal_target, picture
from PIL.Image import Image
from real_torchvision import link_torchvision
from serving import OVERLAP, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

SHAPE = (3, 8, 32)
TOKENS = 48
FLAGS = ("--skip-server-warmup", "--enable-multimodal")
# As in test_families.py; and SGLang would take memory for the states of thousands of requests.
HYBRID = ("qwen3_5", "qwen3_5_moe")
OF_HYBRID = {"EAGLE_POLICY": "random", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
STATES = ("--max-mamba-cache-size", "64")
ALWAYS = [("qwen3_5", "eagle3")]
OWN_LAYER = "MTP layer"  # of the target's own, in place of a head
# Not Mistral 3: of the tiny target's tokens SGLang makes empty text, and its class captures no layers for EAGLE-3.
PAIRS = [
    *((kind, head) for kind in ("qwen3_5", "qwen3_vl") for head in ("eagle3", "peagle", "eagle2")),
    ("qwen3_5_moe", "eagle3"),
    ("qwen3_5", OWN_LAYER),
]


class Servers(NamedTuple):
    kind: str
    plain: Server
    plugin: Server
    folder: Path  # where the plugin's verifier can be broken (broken_verifier.py)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(pair, id="-".join(pair), marks=() if pair in ALWAYS else pytest.mark.matrix) for pair in PAIRS
    ],
)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    kind, head = request.param
    folder = tmp_path_factory.mktemp("pictures")
    make_target = mtp_target if head == OWN_LAYER else multimodal_target
    target = make_target(folder / "target", kind)
    shared, flags = (OF_HYBRID, (*FLAGS, *STATES)) if kind in HYBRID else (OVERLAP, FLAGS)
    broken = broken_verifier.install(folder / "plugins")
    chunks = ("--chunked-prefill-size", "32")  # pictures are read in parts
    specs = [
        tiny_spec(target, extra_flags=flags, environment=shared),
        tiny_spec(
            target,
            target if head == OWN_LAYER else family_head(folder / "head", target, head),
            SHAPE,
            extra_flags=(*flags, *chunks),
            environment=shared | broken,
            algorithm="EAGLE" if head in ("eagle2", OWN_LAYER) else "EAGLE3",
        ),
    ]
    with serving(specs, folder / "logs", first_path=link_torchvision(folder / "torchvision")) as (plain, plugin):
        yield Servers(kind, plain, plugin, folder / "plugins")


def look(server: Server, kind: str) -> list[dict[str, Any]]:
    """Greedy answers to ten prompts, of which most have one or two pictures."""

    def ask(i: int) -> dict[str, Any]:
        pictures = [picture(i + 7 * k, (32 + 16 * (i % 3), 64)) for k in range((2 * i) % 3)]
        body: dict[str, Any] = {
            "text": f"look {i} " + PLACES[kind] * len(pictures) + " and say" + " it" * i,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        }
        body |= {"image_data": [address(picture) for picture in pictures]} if pictures else {}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=600, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(10)))


def address(image: Image) -> str:
    written = io.BytesIO()
    image.save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def test_pictures_in_prompts(servers: Servers) -> None:
    expected = responses(look(servers.plain, servers.kind))
    assert len(set(expected)) == len(expected), "equality would prove little"
    for _ in range(2):  # then from the prefix cache
        answers = look(servers.plugin, servers.kind)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.1


def test_prompts_of_text_and_aborts(servers: Servers) -> None:
    prompts = make_prompts(12)
    expected = responses(generate_all(servers.plain, prompts, TOKENS, at_once=4))
    assert len(set(expected)) > len(prompts) * 0.8, "equality would prove little"
    check_aborted_requests(servers.plugin, prompts, expected, TOKENS, times=2)


@pytest.mark.matrix
def test_sampled_text_has_the_distribution_of_plain_decoding(servers: Servers) -> None:
    """The control: a verifier that takes every temperature for 1."""
    check_distribution(servers.plain, servers.plugin, servers.folder, sampling_settings(KINDS[servers.kind][0]))
