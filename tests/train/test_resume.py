"""A run that was stopped anywhere ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_runs import extract_features, newest, recipe, run_training, weights, write_recipe, write_rows

from eagle_plugin.common.file_digests import write_digests
from eagle_plugin.learning.train import command
from eagle_plugin.learning.train.checkpoint import FILES
from eagle_plugin.learning.train.logs import read_log
from eagle_plugin.learning.train.progress import Bar
from eagle_plugin.learning.train.recipe import TrainError


def state(run: Path) -> dict[str, object]:
    return json.loads(newest(run, "state.json").read_text())


@pytest.mark.parametrize(
    ("kind", "name"), [("eagle3", "adamw"), ("eagle3", "muon"), ("peagle", "adamw"), ("dflash", "adamw")]
)
def test_two_halves_are_bitwise_one_run(features, tmp_path: Path, kind: str, name: str) -> None:
    # Two phases: the second half must also begin with the right one.
    phases = [{"share": 0.4, "steps": 1, "batch_tokens": 150}, {"share": 0.6, "steps": 3, "lr": 5e-4}]
    values = recipe(features.target, features.store, phases=phases, budget={"updates": 24}, eval_every=100)
    values["optimiser"] = {"name": name, "lr": 1e-3, "lm_head_lr": 3e-4, "schedule": "linear"}
    if kind == "peagle":  # draws which masked rows it drops
        values |= {"head": {"kind": kind, "mask_token_id": 2}, "loss": {"segment_rows": 30}}
    if kind == "dflash":  # draws which blocks it makes; of those that are causal a phase may draft fewer levels
        values |= {"head": {"kind": kind, "mask_token_id": 2, "causal": True}}
    whole = run_training(tmp_path, "whole", values, "checkpoint_every=24")

    half = tmp_path / "half"
    seen = []

    def stop_halfway(self, *arguments, save=command.Trainer._save):
        save(self, *arguments)
        seen.append(self.position.update)
        if self.position.update == 12:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Trainer, "_save", stop_halfway)
        file = write_recipe(tmp_path / "half.yaml", values)
        with pytest.raises(KeyboardInterrupt):
            command.main([str(file), "--out", str(half), "--set", "checkpoint_every=12"])
    assert seen == [12] and not (half / "head").exists()
    run_training(tmp_path, "half", values, "checkpoint_every=12")

    assert weights(half) == weights(whole)
    for file in ("parameters.safetensors", "optimiser.safetensors"):
        ours, theirs = load_file(newest(half, file)), load_file(newest(whole, file))
        assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
    assert state(half)["position"] == state(whole)["position"]
    if (kind, name) == ("eagle3", "adamw"):  # Control: another seed gives other weights, so equal bytes mean something.
        other = run_training(tmp_path, "other", values, "seed=1", "checkpoint_every=24")
        assert weights(other) != weights(whole)


def test_killed_run_goes_on_to_the_same_weights(features, tmp_path: Path) -> None:
    values = recipe(features.target, features.store, budget={"updates": 80}, eval_tokens=0, checkpoint_every=5)
    file = write_recipe(tmp_path / "killed.yaml", values)
    run = tmp_path / "killed"
    args = [sys.executable, "-m", "eagle_plugin.learning.train.command", str(file), "--out", str(run)]
    process = subprocess.Popen(args, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not list((run / "checkpoints").glob("update-*")):
            assert process.poll() is None, "ended before its first checkpoint"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed_at = state(run)["position"]["update"]
    assert 0 < killed_at < 80

    run_training(tmp_path, "killed", values)
    assert weights(run) == weights(run_training(tmp_path, "whole", values))
    updates = [row["update"] for row in read_log(run / "logs" / "train.csv")]
    assert updates == sorted(set(updates)) and updates[-1] == 80


def test_sigterm_saves_and_exits_130(features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = recipe(features.target, features.store, budget={"minutes": 30}, eval_tokens=0, checkpoint_every=10_000)
    file = write_recipe(tmp_path / "stopped.yaml", values)
    args = [str(file), "--out", str(tmp_path / "stopped")]
    reports = []

    def signal_at_third(self, *numbers):
        reports.append(numbers)
        if len(reports) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Bar, "report", signal_at_third)
    assert command.main(args) == 130
    first = state(tmp_path / "stopped")
    assert first["position"]["update"] in (6, 7) and not (tmp_path / "stopped" / "head").exists()

    # The time budget includes the time before the stop.
    monkeypatch.undo()
    spent = json.loads(newest(tmp_path / "stopped", "state.json").read_text())
    spent["seconds"] = 30 * 60 - 0.2
    newest(tmp_path / "stopped", "state.json").write_text(json.dumps(spent))
    write_digests(newest(tmp_path / "stopped", ""), FILES)
    assert command.main(args) == 0
    assert 30 * 60 <= state(tmp_path / "stopped")["seconds"] < 30 * 60 + 60


def test_resume_refuses_what_would_be_another_run(features, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(features.store, store)
    values = recipe(features.target, store)
    run_training(tmp_path, "run", values)
    file = write_recipe(tmp_path / "run.yaml", values)
    args = [str(file), "--out", str(tmp_path / "run")]
    with pytest.raises(TrainError, match=r"loss\.decay \(None -> 0\.5\); optimiser\.lr \(0\.001 -> 0\.002\)") as error:
        command.main([*args, "--set", "optimiser.lr=2e-3", "--set", "loss.decay=0.5"])
    assert "--out" in str(error.value)
    # Keys that do not change the weights may change.
    assert command.main([*args, "--set", "log_every=1", "--set", "checkpoint_every=2"]) == 0
    with pytest.raises(TrainError, match="other documents"):
        more = write_rows(tmp_path / "more.jsonl", 3, seed=7)
        extract_features(more, features.target, store)
        command.main(args)
