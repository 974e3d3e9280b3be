"""The loop as a job: its options, its stages, and what is refused in a folder that was begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.jobs.stage import Stage
from eagle_plugin.learning.jobs.stages import list_stages
from eagle_plugin.learning.loop import command, step
from eagle_plugin.learning.loop.prompts import LoopError

NAMES = [
    "prompts", "traffic", "train head", "accept length", "benchmark", "report", "exchange", "summary",
]  # fmt: skip


def plan(folder: Path, target: Path, head: Path, *args: str) -> dict[str, Stage]:
    job = command.job_of(command.parse(["--target", str(target), "--head", str(head), *args]))
    return {stage.name: stage for stage in list_stages(job, target, folder)}


def test_the_job_trains_on_the_recorded_traffic_and_measures_what_is_held_out(
    tmp_path, tiny_target, tiny_eagle3
) -> None:
    options = ("--concurrency", "1", "8", "--epochs", "3", "--lr", "1e-5", "--count", "12", "--swap-clients", "2")
    stages = plan(tmp_path, tiny_target, tiny_eagle3, *options)
    assert list(stages) == NAMES
    assert len({stage.output for stage in stages.values()}) == len(stages)
    recipe, bench = yaml.safe_load(stages["train head"].recipe), stages["benchmark"].args
    store = tmp_path / "features/recorded"
    assert recipe["data"]["store"] == [str(store)] and stages["traffic"].output == store / "manifest.json"
    # Of other settings nothing is continued.
    files = [tmp_path / f"recorded{end}" for end in (".jsonl", ".skipped.jsonl", ".model.json")]
    assert stages["traffic"].partial == (*files, store)
    assert (recipe["head"]["from"], recipe["budget"]["epochs"]) == (str(tiny_eagle3), 3)
    assert float(recipe["optimiser"]["lr"]) == 1e-5
    held_out = str(tmp_path / "held-out.jsonl")
    assert held_out in bench and bench[bench.index("--concurrency") + 1 :][:2] == ["1", "8"]
    assert [name for name, stage in stages.items() if held_out in " ".join(stage.args)] == ["benchmark", "exchange"]
    assert str(tmp_path / "held-out-rows.jsonl") in stages["accept length"].args


def test_every_step_has_a_function_that_takes_its_arguments(tmp_path, tiny_target, tiny_eagle3, monkeypatch) -> None:
    """pydantic checks names and types of the arguments, of real functions with their bodies taken out."""
    stages = plan(tmp_path, tiny_target, tiny_eagle3).values()
    own = {stage.name: stage.args for stage in stages if stage.module}
    assert {stage.module for stage in stages} == {None, step.__name__}
    assert own.keys() == step.STEPS.keys() == {name for name, _ in own.values()}
    ran = []
    for name, function in step.STEPS.items():
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        assert set(json.loads(own[name][1])) == set(names), name
        monkeypatch.setitem(step.STEPS, name, lambda **values: ran.append(values))
        assert step.main(*own[name]) == 0
    assert len(ran) == len(own)
    monkeypatch.setitem(step.STEPS, "summary", lambda **_: (_ for _ in ()).throw(LoopError("no file")))
    assert step.main(*own["summary"]) == 2


def test_the_vocabulary_is_counted_in_the_recorded_answers(tmp_path, tiny_target, tiny_eagle3) -> None:
    values = command.workflow_values("traffic-builtin", str(tiny_target), str(tiny_eagle3), [], [])
    job = command.check_job(values | {"vocabulary": 32}, [], "the recipe")
    names = {stage.name: stage.args for stage in list_stages(job, tiny_target, tmp_path)}
    assert list(names)[:3] == ["prompts", "traffic", "vocabulary"]
    assert str(tmp_path / "recorded.jsonl") in names["vocabulary"]


def test_without_an_exchange(tmp_path, tiny_target, tiny_eagle3) -> None:
    stages = plan(tmp_path, tiny_target, tiny_eagle3, "--no-swap", "--swap-clients", "2")
    assert list(stages) == [name for name in NAMES if name != "exchange"]


def test_other_options_are_refused_with_both_values(tmp_path, tiny_target, tiny_eagle3) -> None:
    args = ["--target", str(tiny_target), "--head", str(tiny_eagle3)]
    begun, other = (command.job_of(command.parse([*args, "--epochs", str(epochs)])) for epochs in (8, 9))
    command.refuse_other_options(other, tmp_path)  # nothing is begun
    (tmp_path / "lineage.json").write_text(json.dumps({"recipe": begun.model_dump(mode="json")}))
    command.refuse_other_options(begun, tmp_path)
    with pytest.raises(LoopError, match=r"train.head.budget.epochs \(8 -> 9\)"):
        command.refuse_other_options(other, tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"compare": None}, "needs the head that serves"),
        ({"prompts": {"builtin": 5}}, "no prompts"),
        ({"traffic": None}, "no traffic"),
        ({"aux_layers": [2, 4]}, "the aux layers of the head that serves"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(tiny_target, tiny_eagle3, keys, message) -> None:
    values = command.workflow_values("traffic-builtin", str(tiny_target), str(tiny_eagle3), [], [])
    with pytest.raises(UserError, match=message):
        command.check_job(values | keys, [], "the recipe")
