"""Two processes learn what one learns: the loss is normalised over all of them, whatever documents each one got."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import training_ranks
from safetensors.torch import load_file
from training_runs import newest, recipe, run_training, write_recipe

from eagle_plugin.learning.train import command
from eagle_plugin.learning.train.logs import read_log

pytestmark = pytest.mark.slow

UPDATES = 8


def launch(recipes: list[Path], processes: int = 2) -> None:
    args = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = Path(training_ranks.__file__)
    paths = os.pathsep.join([str(script.parents[2]), str(script.parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([*args, str(script), *map(str, recipes)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def runs(features, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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
    ]
    files.append(write_recipe(folder / "local.yaml", values))
    launch(files)
    return found | {file.stem: file.with_suffix("") for file in files}


@pytest.mark.parametrize("kind", ["", "-peagle", "-dflash"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
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


def distance(first: Path, second: Path) -> float:
    """The largest difference of two sets of parameters."""
    ours, theirs = load_file(first), load_file(second)
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


def test_checkpoint_goes_on_with_another_number_of_processes(runs: dict[str, Path], features) -> None:
    run = runs["fsdp"]
    args = [str(run.with_suffix(".yaml")), "--out", str(run)]
    before = (run / "head" / "model.safetensors").read_bytes()
    assert command.main(args) == 0  # one process resumes what two had saved, and exports the same head
    assert (run / "head" / "model.safetensors").read_bytes() == before
