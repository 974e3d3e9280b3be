"""The target's weights are updated while the server runs: new text, the same head, and never a server that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from bigram_models import bigram_target as make_target
from penalised_greedy import PROMPTS, greedy_ids
from sampling_requests import SETTINGS
from serving import GRAPHS, accept_length, generate_all, serving, tiny_spec
from torch import nn
from trained_heads import rewrite

pytest.importorskip("sglang")

from safetensors.torch import load_file

from eagle_plugin.bench.servers import Server
from eagle_plugin.runtime.draft_weights import int8_copy
from eagle_plugin.sglang import draft_weights, weight_updates

LENGTH = 32
FIXED = GRAPHS | {"EAGLE_POLICY": "fixed"}


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same form that says something else."""
    return make_target(tmp_path_factory.mktemp("other") / "target", seed=12)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, bigram_target: Path, bigram_eagle3: Path) -> Iterator[Server]:
    spec = tiny_spec(bigram_target, bigram_eagle3, (3, 2, 8), **SETTINGS | {"environment": FIXED, "name": "updated"})
    with serving([spec], tmp_path_factory.mktemp("updated")) as (found,):
        yield found


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/{route}", json=body, timeout=120, trust_env=False)


def from_tensors(server: Server, target: Path, **options: Any) -> None:
    """Send all tensors of a checkpoint."""
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")  # the server is no child of this process
    tensors = list(load_file(target / "model.safetensors").items())
    sent = MultiprocessingSerializer.serialize(tensors, output_str=True)
    for route, body in (
        ("begin_weight_update", {}),
        ("update_weights_from_tensor", {"serialized_named_tensors": [sent]}),
        ("end_weight_update", {}),
    ):
        answer = post(server, route, **body, **(options if route != "end_weight_update" else {}))
        assert answer.status_code == 200, answer.text


@pytest.mark.server
def test_the_target_is_updated_and_the_head_drafts_on(
    server: Server, bigram_target: Path, other_target: Path, tmp_path: Path
) -> None:
    expected = {
        path: [greedy_ids(path, prompt, LENGTH, {}) for prompt in PROMPTS] for path in (bigram_target, other_target)
    }
    assert expected[bigram_target] != expected[other_target]

    def says(target: Path) -> float:
        answers = generate_all(server, PROMPTS, LENGTH, 4)
        assert [one["output_ids"] for one in answers] == expected[target]
        return accept_length(answers)

    good = says(bigram_target)
    assert post(server, "update_weights_from_disk", model_path=str(other_target)).status_code == 200
    assert says(other_target) < good - 0.3  # the head was made for the first one
    from_tensors(server, bigram_target)
    assert says(bigram_target) == pytest.approx(good, abs=0.1)

    # A checkpoint that cannot be loaded: an answer, and the server lives.
    broken = rewrite(
        bigram_target, tmp_path / "broken", weights=lambda all: all | {"lm_head.weight": torch.zeros(3, 5)}
    )
    answer = post(server, "update_weights_from_disk", model_path=str(broken))
    assert answer.status_code == 400 and "could not be loaded" in answer.json()["message"], answer.text
    assert post(server, "update_weights_from_disk", model_path=str(tmp_path / "missing")).status_code == 400
    assert post(server, "update_weights_from_disk", model_path=str(bigram_target)).status_code == 200
    assert says(bigram_target) == pytest.approx(good, abs=0.1)
    again = {"model_path": str(other_target), "recapture_cuda_graph": True}
    answer = post(server, "update_weights_from_disk", **again)
    assert answer.status_code == 400 and "does not capture its rounds again" in answer.json()["message"], answer.text
    assert says(bigram_target) == pytest.approx(good, abs=0.1)
    assert "the draft head drafts on" in server.log_text()


@pytest.mark.parametrize("is_own_layer", [False, True])
def test_an_update_of_the_draft_model_goes_to_the_head(is_own_layer: bool) -> None:
    """What the engine's manager would select, by what a request or its session names; an MTP layer of the target
    gets what the target gets."""

    class Worker:
        draft_worker = SimpleNamespace(is_own_layer=is_own_layer)

    class Manager:
        draft_worker, _session = Worker(), None

    class Request:
        selector = "all"

    manager, request = Manager(), Request()
    worker = manager.draft_worker
    of_all = worker if is_own_layer else None
    for chosen, seen in (("all", of_all), ("target", worker), ("draft", worker)):
        request.selector = chosen
        assert weight_updates.begin_or_end(lambda m, r: m.draft_worker, manager, request) is seen
        assert manager.draft_worker is worker
    ends, session = object(), Request()
    session.selector = "draft"
    manager._session = session
    assert weight_updates.begin_or_end(lambda m, r: m.draft_worker, manager, ends) is worker
    session.selector = "all"
    assert weight_updates.begin_or_end(lambda m, r: m.draft_worker, manager, ends) is of_all


def test_rounded_copies_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    head = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    with torch.no_grad():
        head[0].weight.normal_(generator=torch.Generator().manual_seed(1))
    if int8_copy(head[0].weight.data) is None:
        pytest.skip("no int8 kernel for this CPU")
    names = [name for name, _ in head.named_parameters()]
    assert draft_weights.use_int8_weights(head, nn.Linear(1, 1)) == 1
    assert [name for name, _ in head.named_parameters()] == names == ["0.weight"], "an update would not find them"
    with torch.no_grad():
        head[0].weight.mul_(-2)
    wanted = int8_copy(head[0].weight.data)
    found = draft_weights.int8_weights(head)["0"]
    assert wanted is not None and not torch.equal(found.scales, wanted.scales)
    weight_updates.take_new_weights(head)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
