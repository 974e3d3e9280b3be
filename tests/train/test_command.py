"""The command: its errors before any work, its help, and its overrides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from training_runs import recipe, write_recipe

from eagle_plugin import cli
from eagle_plugin.learning.data.store.features import Readout
from eagle_plugin.learning.data.vocabulary import save_draft_vocabulary
from eagle_plugin.learning.train import command
from eagle_plugin.learning.train.model import make_head, make_objective
from eagle_plugin.learning.train.objectives import Objective
from eagle_plugin.learning.train.recipe import TrainError, changed_keys, parse_recipe, read_recipe

SMALLEST = {"target": "models/llama", "data": {"store": "out/features"}, "budget": {"epochs": 3}}


def test_smallest_recipe_of_the_help_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    settings = parse_recipe(SMALLEST, "recipe")
    assert settings.data.store[0].url == "out/features" and settings.depths == 4
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "torchrun --nproc-per-node 8" in text and "budget: {epochs: 3}" in text


def test_names_become_folders(tmp_path: Path) -> None:
    values = SMALLEST | {"target": str(tmp_path), "head": {"from": "smollm2-135m-instruct-eagle3"}}
    settings = command._find_folders(parse_recipe(values, "recipe"))
    assert settings.target == tmp_path and settings.head.start is not None
    assert (settings.head.start / "model.safetensors").is_file()


def test_every_wrong_key_is_named_at_once(tmp_path: Path) -> None:
    values = SMALLEST | {"optimiser": {"lr": -1, "betas": [0.9, 2]}, "phases": [{"steps": 99}], "bogus": 3}
    with pytest.raises(TrainError) as error:
        read_recipe(write_recipe(tmp_path / "bad.yaml", values))
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/bad.yaml has 4 wrong key(s)")
    for part in (
        "optimiser.lr: Input should be greater than 0 (got -1)",
        "optimiser.betas.1",
        "phases.0.steps: Input should be less than or equal to 16 (got 99)",
        "bogus: Extra inputs are not permitted (got 3)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": {}}, "wanted one of tokens, epochs, updates, minutes, found none"),
        ({"budget": {"epochs": 1, "minutes": 2}}, "found epochs and minutes"),
        ({"data": {}}, "wanted store or rows, found neither"),
        ({"data": {"store": "a", "rows": "b"}}, "found both"),
        ({"data": {"store": "a", "aux_layers": [1, 2, 3]}}, "fixed when the store was made"),
        ({"phases": [{"share": 0.5}, {"share": 0.4}]}, "sum to 0.9, wanted 1"),
        ({"head": {"from": "h", "layers": 2}}, "an existing head (`from`) has its own layers"),
        ({"loss": {"oov": "drop", "teacher": "draft"}}, "oov drop needs teacher full"),
        ({"head": {"kind": "eagle9"}}, "'eagle2', 'eagle3' or 'peagle'"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TrainError) as error:
        parse_recipe(SMALLEST | change, "recipe")
    assert message in str(error.value)


def test_overrides_reach_every_level(tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "r.yaml", SMALLEST | {"phases": [{"share": 0.5}, {"share": 0.5}]})
    args = ["optimiser.lr=3e-3", "phases.1.steps=7", "budget={minutes: 5}", "head.from=heads/old", "threads=2"]
    settings = read_recipe(file, args)
    assert settings.optimiser.lr == 3e-3 and [phase.steps for phase in settings.phases] == [4, 7]
    assert settings.budget.minutes == 5 and settings.head.start == Path("heads/old") and settings.threads == 2
    for word, message in (
        ("lr", "not key=value"),
        ("phases.9.steps=1", "phases has 2 entries"),
        ("target.x=1", "goes through 'target'"),
        ("a=[", "is not YAML"),
    ):
        with pytest.raises(TrainError, match=message):
            read_recipe(file, [word])


def test_changed_keys_are_dotted_and_free_ones_left_out() -> None:
    old = parse_recipe(SMALLEST | {"threads": 1}, "recipe").model_dump(mode="json", by_alias=True)
    new = parse_recipe(SMALLEST | {"threads": 2, "micro_tokens": 9, "loss": {"top_k": 10}}, "r").model_dump(
        mode="json", by_alias=True
    )
    assert changed_keys(old, new) == ["loss.top_k (0 -> 10)"]
    new["data"] |= {"cache": "elsewhere", "cache_gib": 500.0}
    del old["data"]["cache_gib"]  # a checkpoint from before there was such a key
    assert changed_keys(old, new) == ["loss.top_k (0 -> 10)"]


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"missing\.yaml cannot be read"):
        read_recipe(tmp_path / "missing.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(TrainError, match="holds a list, wanted a mapping"):
        read_recipe(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("a: [1")
    with pytest.raises(TrainError, match="is not YAML"):
        read_recipe(tmp_path / "torn.yaml")


def test_folder_in_use_and_folder_that_cannot_be(features, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "r.yaml", recipe(features.target, features.store))
    (tmp_path / "busy").mkdir()
    with FileLock(tmp_path / "busy" / ".lock"), pytest.raises(TrainError, match="in use by another training run"):
        command.main([str(file), "--out", str(tmp_path / "busy")])
    with pytest.raises(TrainError, match="cannot be written"):
        command.main([str(file), "--out", str(file / "under-a-file")])
    with pytest.raises(TrainError, match="no GPU here"):
        command.main([str(file), "--out", str(tmp_path / "gpu"), "--set", "device=cuda"])


def test_float32_on_a_gpu_is_refused_where_its_attention_has_none(features) -> None:
    settings = parse_recipe(recipe(features.target, features.store, dtype="float32"), "recipe")
    head, readout = make_head(settings, (2, 3, 4)), Readout(torch.zeros(512, 64), None)
    with pytest.raises(TrainError, match="dtype is float32, in which a head of kind eagle3 is not trained on a GPU"):
        make_objective(settings, head, readout, torch.device("cuda", 0))
    make_objective(settings, head, readout, torch.device("cpu"))


def test_memory_that_runs_out_is_one_sentence_that_names_the_key(
    features, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 79 GiB.")

    monkeypatch.setattr(Objective, "forward", run_out)
    for keys, now in (({}, "no limit"), ({"micro_tokens": 5000}, "5,000 tokens per forward")):
        file = write_recipe(tmp_path / "r.yaml", recipe(features.target, features.store, **keys))
        assert cli.main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert error.count("error: ") == 1 and "Traceback" not in error
        assert "error: the memory of cpu ran out (CUDA out of memory. Tried to allocate 2.00 GiB); " in error
        assert f"lower micro_tokens (now {now}) or batch_tokens (now " in error
        assert "), end what else uses this GPU, or compute on the CPU" in error


def test_the_mass_of_a_draft_vocabulary_is_that_of_the_whole_one(
    features, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With teacher draft too, which learns from the draft vocabulary's part alone."""
    save_draft_vocabulary(tmp_path / "ids", torch.arange(3, 100), torch.ones(512, dtype=torch.int64))
    printed = {}
    for teacher in ("draft", "full"):
        values = recipe(features.target, features.store, loss={"teacher": teacher}, budget={"updates": 0})
        values["head"] |= {"vocabulary": str(tmp_path / "ids")}
        file = write_recipe(tmp_path / f"{teacher}.yaml", values)
        assert command.main([str(file), "--out", str(tmp_path / "run" / teacher)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        printed[teacher] = text[text.index("held-out accuracy") : text.index("learning curve")]
    assert printed["draft"] == printed["full"]
    found = re.search(r"mass on the draft vocabulary \W*([\d.]+)%", printed["draft"])
    assert found is not None and float(found[1]) < 90


def test_summary_says_what_was_reached(features, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(tmp_path / "r.yaml", recipe(features.target, features.store))
    assert command.main([str(file), "--out", str(tmp_path / "run")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("eagle3 head for tiny-llama", "512 tokens", "(1.0", "held-out acceptance by depth", "100.0%"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "dtype", "warned"), [("muon", "float32", True), ("muon", "bfloat16", False), ("adamw", "float32", False)]
)
def test_muon_warns_on_a_cpu_without_bfloat16(
    features, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name, dtype, warned
) -> None:
    monkeypatch.setattr(command, "fast_dtype", lambda device: dtype)
    values = recipe(features.target, features.store, optimiser={"name": name}, budget={"updates": 0}, eval_tokens=0)
    assert command.main([str(write_recipe(tmp_path / "r.yaml", values)), "--out", str(tmp_path / "run")]) == 0
    assert ("Muon computes in bfloat16" in capsys.readouterr().err) == warned
