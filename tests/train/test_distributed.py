"""Two processes learn what one learns: the loss is normalised over all of them, whatever documents each one got."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_runs import distance, launch_ranks, newest, recipe, run_training, write_recipe

from eagle_plugin.learning.train import distributed
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.logs import read_log
from eagle_plugin.learning.train.model import Parameters
from eagle_plugin.learning.train.recipe import TrainError, parse_recipe

pytestmark = pytest.mark.slow

UPDATES = 8


@pytest.fixture(scope="module")
def runs(features, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """The same recipe by one process, by two with DDP and with FSDP2, and by two that do not share their sums."""
    folder = tmp_path_factory.mktemp("ranks")
    # Few documents per update, so that the two shares have unequal masks, and several forwards each.
    values = recipe(features.target, features.store, budget={"updates": UPDATES}, batch_tokens=120, micro_tokens=50)
    values |= {"log_every": 1, "eval_every": 4, "checkpoint_every": 4}
    # A process without a document of its own must not train on the prompt of another's.
    values |= {"loss": {"prompt_weight": 0.5}}
    # Without dropped rows, which every process draws for itself; several segments per forward.
    masked = {"kind": "peagle", "layers": 2, "mask_token_id": 2}
    peagle = values | {
        "head": masked,
        "loss": {"keep_rate": 1.0, "keep_floor": 1.0, "segment_rows": 12, "prompt_weight": 0.5},
    }
    blocks = {"head": masked | {"kind": "dflash"}, "loss": {"keep_rate": 1.0, "prompt_weight": 0.5}}
    recipes = {"": values, "-peagle": peagle, "-dflash": values | blocks}
    found = {f"one{kind}": run_training(folder, f"one{kind}", each) for kind, each in recipes.items()}
    files = [
        write_recipe(folder / f"{name}{kind}.yaml", each | {"parallel": name})
        for name in ("ddp", "fsdp")
        for kind, each in recipes.items()
        if name == "ddp" or kind != "-dflash" or "not matrix" not in request.config.option.markexpr
    ]
    files.append(write_recipe(folder / "local.yaml", values))
    launch_ranks(files)
    return found | {file.stem: file.with_suffix("") for file in files}


@pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        *(("ddp", kind) for kind in ("", "-peagle", "-dflash")),
        *(("fsdp", kind) for kind in ("", "-peagle")),
        pytest.param("fsdp", "-dflash", marks=pytest.mark.matrix),
    ],
)
def test_two_processes_equal_one(runs: dict[str, Path], parallel: str, kind: str) -> None:
    name, one = f"{parallel}{kind}", f"one{kind}"
    for split in ("train", "val"):
        ours, theirs = (read_log(runs[run] / "logs" / f"{split}.csv") for run in (name, one))
        assert [row["update"] for row in ours] == [row["update"] for row in theirs]
        for key in ("tokens", "loss", "loss_2", "accuracy_1"):
            assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-4)
    assert distance(newest(runs[name]), newest(runs[one])) < 2e-5


def test_control_sums_that_are_not_shared_give_other_weights(runs: dict[str, Path]) -> None:
    assert distance(newest(runs["local"]), newest(runs["one"])) > 1e-3


def test_gradients_of_ddp_stay_in_its_buckets() -> None:
    """An update of two forwards has no others beside them, from the second update on; as in `Trainer`, one process."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        inner = nn.Linear(8, 8)
        module = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        data = {"target": "models/llama", "data": {"store": "out/features"}, "budget": {"epochs": 3}}
        settings = parse_recipe(data, "recipe")
        storages = []
        for in_buckets in (False, True):
            parameters = Parameters(inner, settings, in_buckets)
            for _ in range(2):
                with module.no_sync():
                    module(torch.ones(1, 8)).sum().backward()
                gradients = [p.grad for p in inner.parameters() if p.grad is not None]
                storages.append(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
                module(torch.ones(1, 8)).sum().backward()
                parameters.step(1.0)
    finally:
        torch.distributed.destroy_process_group()
    assert storages[1] == 2 and storages[3] == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_fails_waits_for_no_other(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave the group can take until the others have waited for an hour in their sums, before the error is told."""
    calls: list[str] = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(distributed.dist, name, lambda *_, name=name, **__: calls.append(name))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with contextlib.suppress(TrainError), distributed.join_ranks("cpu", "ddp") as ranks:
        assert ranks.world == 2
        if fails:
            raise TrainError("no document is left")
    assert calls == ["init_process_group", "destroy_process_group"][: 1 if fails else 2]


def test_ddp_keeps_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize estimate` counts them once."""
    made = []

    class Wrapper:
        def __init__(
            self,
            module: nn.Module,
            device_ids: list[int] | None = None,
            broadcast_buffers: bool = True,
            gradient_as_bucket_view: bool = False,
        ) -> None:
            made.append((device_ids, broadcast_buffers, gradient_as_bucket_view))

    monkeypatch.setattr(distributed, "DistributedDataParallel", Wrapper)
    Ranks(0, 2, torch.device("cpu")).wrap(nn.Linear(2, 2))
    assert made == [(None, False, True)]
