"""Another head in the place of the served one in SGLang, while requests run: texts stay, accept lengths change."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from penalised_greedy import PROMPTS, greedy_ids
from sampling_requests import SETTINGS
from serving import GRAPHS, SYNCHRONOUS, accept_length, generate, generate_all, serving, tiny_spec
from torch import nn
from trained_heads import Weights, rewrite

pytest.importorskip("sglang")

from eagle_plugin.cli import main
from eagle_plugin.common.deploy_folder import FOLDER
from eagle_plugin.heads.files import HeadError
from eagle_plugin.sglang.head_exchange import pairs, tensors_of

LENGTH = 40
WAYS = {"synchronous": SYNCHRONOUS, "graphs": GRAPHS | {"EAGLE_POLICY": "fixed"}}


def never_right(weights: Weights) -> Weights:
    """The same head with its directions turned round."""
    return {
        name: -values if name.endswith(("down_proj.weight", "o_proj.weight", "fc.weight")) else values
        for name, values in weights.items()
    }


@pytest.fixture(scope="module")
def heads(tmp_path_factory, bigram_eagle3, bigram_peagle) -> dict[str, tuple[Path, Path]]:
    """Of a kind: a head whose drafts are seldom right, and a good one of the same form."""
    made = tmp_path_factory.mktemp("heads")
    good = {"synchronous": bigram_eagle3, "graphs": bigram_peagle}
    return {way: (rewrite(head, made / way, weights=never_right), head) for way, head in good.items()}


@pytest.fixture(scope="module", params=[pytest.param("synchronous", marks=pytest.mark.matrix), "graphs"])
def served(request, tmp_path_factory, bigram_target, heads):
    """A way, its server, and the folder of that: one runs its rounds at once, one replays captured ones."""
    way = request.param
    folder = tmp_path_factory.mktemp("exchange") / way
    folder.mkdir(mode=0o700)
    flags = (*SETTINGS["extra_flags"], "--enable-metrics")
    settings = SETTINGS | {"extra_flags": flags, "environment": WAYS[way] | {FOLDER: str(folder)}}
    with serving([tiny_spec(bigram_target, heads[way][0], (4, 3, 16), **settings)], folder.parent) as (server,):
        yield way, server, folder


@pytest.mark.server
def test_requests_go_on_and_the_accept_length_changes(served, heads, bigram_target, capsys):
    way, server, folder = served
    wanted = [greedy_ids(bigram_target, prompt, LENGTH, {}) for prompt in PROMPTS]

    def asked() -> list[dict[str, Any]]:
        return generate_all(server, PROMPTS, LENGTH, 4)

    def deployed(head: Path) -> dict[str, Any]:
        options = ["--server", server.url, "--folder", str(folder), "--no-watch", "--json"]
        assert main(["deploy", str(head), *options]) == 0
        return json.loads(capsys.readouterr().out)

    bad, good = heads[way]
    before = asked()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(generate, server, prompt, 8 * LENGTH) for prompt in PROMPTS * 3]
        assert deployed(good)["before"] == str(bad)
        during = [one.result() for one in running]
    after = asked()
    assert [one["output_ids"] for one in before] == wanted == [one["output_ids"] for one in after]
    assert [one["output_ids"][:LENGTH] for one in during] == wanted * 3
    assert accept_length(after) > accept_length(before) + 0.3
    deployed(bad)
    assert accept_length(asked()) == pytest.approx(accept_length(before), abs=0.1)


class Head(nn.Module):
    """The parts of a loaded head that a round reads."""

    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3, _weight=embedding.data)
        self.embed.weight = embedding
        self.fc = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(2))


def test_a_copy_keeps_addresses_and_what_is_shared() -> None:
    shared = nn.Parameter(torch.randn(4, 3))
    old, new = Head(shared), Head(shared)
    tokens = torch.arange(3), torch.arange(3) + 7
    found = pairs(tensors_of(old, tokens[0]), tensors_of(new, tokens[1]))
    assert {id(one) for one, _ in found} == {id(x) for x in (old.fc.weight, old.fc.bias, old.table, tokens[0])}
    for one, other in found:
        assert one.shape == other.shape and one.data_ptr() != other.data_ptr()


def test_another_form_is_refused_before_anything_is_copied() -> None:
    shared = nn.Parameter(torch.randn(4, 3))
    old, new = Head(shared), Head(shared)
    new.table = torch.zeros(3)
    with pytest.raises(HeadError, match=r"\[3\] torch.float32 for table, wanted \[2\]"):
        pairs(tensors_of(old), tensors_of(new))
    with pytest.raises(HeadError, match="nothing for draft vocabulary"):
        pairs(tensors_of(old, torch.arange(2)), tensors_of(Head(shared)))
