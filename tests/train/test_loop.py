"""The loop: phases, learning rates, logs, pictures, and heads that are trained further."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from safetensors.torch import load_file
from torch import Tensor
from training_runs import newest, recipe, run_training, weights

from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.data.store.feature_store import Document, Entry, FeatureStore
from eagle_plugin.learning.data.vocabulary import save_draft_vocabulary
from eagle_plugin.learning.train import command, sources
from eagle_plugin.learning.train.curve import draw_curve, write_curve
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.logs import COLUMNS, TRAIN_COLUMNS, CsvLog, depth_columns, read_log
from eagle_plugin.learning.train.model import Parameters
from eagle_plugin.learning.train.recipe import BudgetSettings, OptimiserSettings, PhaseSettings, TrainError
from eagle_plugin.learning.train.schedule import learning_factor, phase_at, spent_share


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    options, phase = OptimiserSettings(lr=1e-3, warm_up=0.1, schedule="linear"), PhaseSettings()
    factors = [learning_factor(options, phase, i / 100) for i in range(101)]
    assert factors[0] > 0 and factors[:10] == sorted(factors[:10])
    assert factors[10] == pytest.approx(1.0) and factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.5) and factors[-1] == 0.0
    cosine = options.model_copy(update={"schedule": "cosine"})
    assert learning_factor(cosine, phase, 0.55) == pytest.approx(0.5)
    assert learning_factor(cosine, phase, 0.2) > learning_factor(options, phase, 0.2)
    assert learning_factor(options.model_copy(update={"schedule": "constant"}), phase, 0.99) == 1.0
    assert learning_factor(options, PhaseSettings(lr=5e-4), 0.55) == pytest.approx(0.25)


def test_phases_begin_at_their_share_of_any_budget() -> None:
    phases = [PhaseSettings(share=0.3), PhaseSettings(share=0.6), PhaseSettings(share=0.1)]
    assert [phase_at(phases, i / 10) for i in range(11)] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]
    spent = {"tokens": 500, "epochs": 1.5, "updates": 20, "seconds": 90.0}
    shares = [spent_share(BudgetSettings(**budget), **spent) for budget in _budgets()]
    assert shares == [0.5, 0.5, 0.5, 0.5, 1.0]


def _budgets() -> list[dict[str, int]]:
    return [{"tokens": 1000}, {"epochs": 3}, {"updates": 40}, {"minutes": 3}, {"updates": 0}]


@pytest.fixture(scope="module")
def run(features, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run in two phases."""
    phases = [{"share": 0.5, "steps": 1, "batch_tokens": 100}, {"share": 0.5, "steps": 3, "lr": 5e-4}]
    values = recipe(features.target, features.store, phases=phases, budget={"epochs": 6}, log_every=1, eval_every=5)
    values["optimiser"] = {"lr": 2e-3, "schedule": "linear", "warm_up": 0.0}
    return run_training(tmp_path_factory.mktemp("loop"), "run", values)


def test_logs_hold_every_column_and_the_phases(run: Path) -> None:
    rows = read_log(run / "logs" / "train.csv")
    header = (run / "logs" / "train.csv").read_text().splitlines()[0].split(",")
    assert header == [*TRAIN_COLUMNS, *depth_columns(3)]
    assert (run / "logs" / "val.csv").read_text().splitlines()[0].split(",") == [*COLUMNS, *depth_columns(3)]
    assert [row["update"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["epoch"] == 6.0
    first = [row for row in rows if row["phase"] == 1]
    second = [row for row in rows if row["phase"] == 2]
    assert first and second and rows == first + second
    assert max(row["epoch"] for row in first) == pytest.approx(3.0, abs=0.2)
    assert all("loss_2" not in row for row in first) and all("loss_3" in row for row in second)
    assert all(row["lr"] < 5e-4 < first[-1]["lr"] for row in second)
    tokens = [row["tokens"] - before["tokens"] for before, row in zip(rows, rows[1:], strict=False)]
    assert max(tokens[: len(first) - 1]) <= 100 < max(tokens[len(first) :]) <= 200


def test_held_out_loss_falls(run: Path) -> None:
    rows = read_log(run / "logs" / "val.csv")
    assert rows[0]["update"] == 0 and len(rows) > 3
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"]
    assert all(0 <= row["accuracy_3"] <= 1 for row in rows)


def test_head_carries_its_lineage(run: Path) -> None:
    notes = json.loads((run / "head" / "eagle_plugin.json").read_text())
    assert notes["kind"] == "eagle3" and notes["training"]["epochs"] == 6.0
    assert notes["training"]["recipe"]["optimiser"]["lr"] == 2e-3
    assert len(notes["acceptance"]) == 3
    assert "/" not in json.dumps(notes["training"]["recipe"])  # folders of the machine it was trained on


def test_learning_curve_is_a_picture(run: Path) -> None:
    pixels = image.imread(run / "logs" / "curve.png")
    assert pixels.shape[0] > 300 and pixels[..., :3].std() > 0.05
    colours = {tuple((pixel * 255).astype(int)) for pixel in pixels[::3, ::3, :3].reshape(-1, 3)}
    assert len(colours) > 10  # axes alone are black, white and grey
    svg = (run / "logs" / "curve.svg").read_text()
    assert svg.count("<path") > 10 and "depth 1" in svg
    # The same numbers give the same bytes.
    assert [path.name for path in draw_curve(run / "logs", "eagle3 for tiny-llama")] == ["curve.png", "curve.svg"]
    curve = json.loads((run / "logs" / "curve.json").read_text())["held_out"]
    rows = read_log(run / "logs" / "val.csv")
    assert [entry["update"] for entry in curve] == [row["update"] for row in rows]
    assert curve[-1]["accuracy"] == [rows[-1][f"accuracy_{k}"] for k in (1, 2, 3)]
    assert curve[-1]["total_loss"] == rows[-1]["loss"] != curve[-1]["loss"][0]
    assert (run / "logs" / "curve.svg").read_text() == svg


def test_nothing_to_draw_draws_nothing(tmp_path: Path) -> None:
    for name in ("train", "val"):
        CsvLog(tmp_path / f"{name}.csv", COLUMNS, 0).close()
    assert draw_curve(tmp_path, "empty") == [] and write_curve(tmp_path) is None and not list(tmp_path.glob("*.png"))


def test_torn_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    log = CsvLog(path, ["update", "loss"], 0)
    for update in range(1, 6):
        log.write({"update": update, "loss": 1 / update})
    log.close()
    with path.open("a") as file:
        file.write("6,0.1")
    log = CsvLog(path, ["update", "loss"], 3)
    log.write({"update": 3, "loss": 7.0})
    log.write({"update": 4, "loss": float("nan")})
    log.close()
    assert path.read_text().splitlines() == ["update,loss", "1,1", "2,0.5", "3,0.333333", "4,"]


def test_no_update_leaves_the_head_as_it_was(run: Path, features, tmp_path: Path) -> None:
    start = run / "head"
    values = recipe(features.target, features.store, head={"from": str(start)}, budget={"updates": 0})
    tuned = run_training(tmp_path, "tuned", values)
    for file in ("model.safetensors", "config.json"):
        ours, theirs = (hashlib.sha256((folder / file).read_bytes()).hexdigest() for folder in (tuned / "head", start))
        assert ours == theirs
    # Control: a few updates change it, and its loss continues from where it was.
    values |= {"budget": {"updates": 6}, "phases": [{"steps": 3}]}
    more = run_training(tmp_path, "more", values)
    assert weights(more) != weights(run)
    before, after = read_log(run / "logs" / "val.csv")[-1], read_log(more / "logs" / "val.csv")[0]
    assert after["loss_1"] == pytest.approx(before["loss_1"], rel=2e-2)  # exported in bfloat16


def test_fine_tuning_keeps_the_draft_vocabulary_unless_told(features, tmp_path: Path) -> None:
    counts = torch.zeros(512, dtype=torch.int64)
    first, second = torch.arange(3, 131), torch.arange(67, 195)
    for name, ids in (("first", first), ("second", second)):
        save_draft_vocabulary(tmp_path / f"{name}.safetensors", ids, counts)
    vocabulary = str(tmp_path / "first.safetensors")
    head = {"kind": "eagle3", "norms": "3.0", "vocabulary": vocabulary}
    start = run_training(tmp_path, "start", recipe(features.target, features.store, head=head))
    values = recipe(features.target, features.store, head={"from": str(start / "head")}, budget={"updates": 2})
    kept = load_any_head(run_training(tmp_path, "kept", values) / "head", features.target)
    assert kept.to_target(torch.arange(128)).equal(first)
    values["head"]["vocabulary"] = str(tmp_path / "second.safetensors")
    changed = load_any_head(run_training(tmp_path, "changed", values) / "head", features.target)
    assert changed.to_target(torch.arange(128)).equal(second)
    values["head"] = {"kind": "eagle2", "vocabulary": vocabulary}
    with pytest.raises(TrainError, match="drafts from all tokens"):
        run_training(tmp_path, "whole", values)


@pytest.mark.parametrize("kind", ["eagle2", "peagle"])
def test_other_kinds_train_and_export(features, tmp_path: Path, kind: str) -> None:
    head = {"kind": kind} | ({"mask_token_id": 2, "layers": 2} if kind == "peagle" else {})
    run = run_training(tmp_path, kind, recipe(features.target, features.store, head=head, budget={"updates": 12}))
    rows = read_log(run / "logs" / "val.csv")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert load_any_head(run / "head", features.target).kind == kind
    if kind == "eagle2":  # the optimiser does not have tensors of the target
        assert not [key for key in load_file(newest(run)) if "lm_head" in key or "fc.bias" in key]
    if kind == "peagle":
        with pytest.raises(TrainError, match="holds token 20, which the head uses as its mask"):
            head["mask_token_id"] = 20
            run_training(tmp_path, "taken", recipe(features.target, features.store, head=head))


def test_parallel_drafting_starts_from_an_eagle3_head(features, tmp_path: Path) -> None:
    values = recipe(features.target, features.store, head={"kind": "eagle3"}, budget={"updates": 12})
    start = str(run_training(tmp_path, "start", values) / "head")
    head = {"kind": "peagle", "from": start, "layers": 2, "mask_token_id": 2}
    values = recipe(features.target, features.store, head=head, phases=[{"steps": 4}], budget={"updates": 12})
    run = run_training(tmp_path, "parallel", values | {"loss": {"segment_rows": 50}})
    trained = load_any_head(run / "head", features.target)
    assert trained.kind == "peagle" and len(trained.layers) == 2
    before, *_, after = read_log(run / "logs" / "val.csv")
    last = read_log(tmp_path / "start" / "logs" / "val.csv")[-1]
    assert before["loss_1"] == pytest.approx(last["loss_1"], abs=1e-2)  # exported in bfloat16
    assert after["loss_4"] < before["loss_4"] - 0.05
    values["head"] = {"kind": "peagle", "from": str(run / "head"), "layers": 3}
    with pytest.raises(TrainError, match="is a head of kind peagle and has its own layers"):
        run_training(tmp_path, "again", values)


def test_micro_batches_sum_to_the_whole(features, tmp_path: Path) -> None:
    values = recipe(features.target, features.store, budget={"updates": 3}, checkpoint_every=100)
    whole = load_file(newest(run_training(tmp_path, "whole", values)))
    parts = load_file(newest(run_training(tmp_path, "parts", values | {"micro_tokens": 60})))
    assert max(float((whole[key] - parts[key]).abs().max()) for key in whole) < 2e-5


@pytest.mark.parametrize(("room", "times"), [(sources.HELD_OUT_BYTES, 1), (0, 3)])
def test_held_out_documents_are_read_once(
    features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, times: int
) -> None:
    """The run evaluates three times; control: without room in memory it reads them each time."""
    taken = Counter[str]()
    read = FeatureStore.read

    def count(store: FeatureStore, entry: Entry, *more: Any) -> Document:
        if entry.split == "val":
            taken[entry.id] += 1
        return read(store, entry, *more)

    monkeypatch.setattr(FeatureStore, "read", count)
    monkeypatch.setattr(sources, "HELD_OUT_BYTES", room)
    run_training(tmp_path, "run", recipe(features.target, features.store))
    assert len(taken) > 2 and set(taken.values()) == {times}


def test_a_process_that_does_not_write_copies_nothing(
    features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    gather = Parameters.gather

    def watch(parameters: Parameters, *keep: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        gathered.append(gather(parameters, *keep))
        return gathered[-1]

    monkeypatch.setattr(Parameters, "gather", watch)

    class Other(Ranks):
        writes = False  # as on every rank but the first

    for kind in (Ranks, Other):
        place = kind(0, 1, torch.device("cpu"))
        monkeypatch.setattr(command, "join_ranks", lambda *_, place=place: contextlib.nullcontext(place))
        gathered.clear()
        run_training(tmp_path, kind.__name__, recipe(features.target, features.store, eval_tokens=0))
        assert len(gathered) == 3  # two checkpoints and the head
        assert all(bool(part) == place.writes for both in gathered for part in both)


def test_run_that_diverges_ends_with_its_cause(features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_plugin.learning.train.model import Parameters

    step = Parameters.step

    def explode(self, factor):
        norm = step(self, factor)
        with torch.no_grad():
            next(iter(self.named.values())).fill_(float("inf"))
        return norm

    monkeypatch.setattr(Parameters, "step", explode)
    with pytest.raises(TrainError, match=r"nan.*at update 2; lower optimiser\.lr"):
        run_training(tmp_path, "run", recipe(features.target, features.store))
    assert not (tmp_path / "run" / "head").exists()
