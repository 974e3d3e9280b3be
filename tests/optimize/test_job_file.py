"""The YAML of a job: workflows, --set, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from job_worlds import write_recipe

from eagle_plugin.cli import main
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.recipes import override_key
from eagle_plugin.learning.jobs.job_file import WORKFLOWS, check_job, workflow_values
from eagle_plugin.learning.jobs.stages import list_stages
from eagle_plugin.policy.shapes import GPU_DEPTH


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path) -> Path:
    return write_recipe(tmp_path / "recipe", tiny_target)


@pytest.mark.parametrize("workflow", [name for name in WORKFLOWS if not name.startswith("traffic")])
def test_every_workflow_is_a_job_that_can_be_planned(workflow, tmp_path, tiny_target, tiny_eagle3) -> None:
    (tmp_path / "chats.jsonl").write_text("{}\n")
    own = [str(tmp_path / "chats.jsonl")] if workflow.endswith("own") else []
    head = None if workflow.startswith("scratch") else str(tiny_eagle3)
    job = check_job(workflow_values(workflow, str(tiny_target), head, own, []), [], "the job")
    names = [stage.name for stage in list_stages(job, tiny_target, tmp_path)]
    # They compute where the machine has a GPU: no stage says cpu.
    assert not [stage for stage in list_stages(job, tiny_target, tmp_path) if "--device" in stage.args]
    report = [] if workflow == "own-head" else ["report"]
    assert names[names.index("check") :] == ["check", "evaluate", "benchmark", *report, "package"]
    assert ("prompts" in names) == ("train head" in names) == (workflow != "own-head")
    assert ("vocabulary" in names) == workflow.startswith("scratch")
    benchmark = next(one for one in list_stages(job, tiny_target, tmp_path) if one.name == "benchmark").args
    assert (str(tiny_eagle3) in benchmark) == (not workflow.startswith("scratch"))


@pytest.mark.parametrize("workflow", ["scratch-builtin", "base-builtin", "traffic-builtin"])
def test_on_a_gpu_heads_learn_as_deep_as_servers_draft_there(workflow, tiny_target, tiny_eagle3) -> None:
    head = None if workflow.startswith("scratch") else str(tiny_eagle3)
    for on_gpu, steps in ((False, 4), (True, GPU_DEPTH)):
        values = workflow_values(workflow, str(tiny_target), head, [], [], on_gpu)
        job = check_job(values, [], "the job")
        assert [phase["steps"] for phase in job.train["head"]["phases"]][-1] == steps
        assert job.generate.max_tokens == (2048 if on_gpu and not workflow.startswith("traffic") else 192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workflow", "scratch"], "--workflow scratch is unknown, wanted one of scratch-builtin"),
        (["--workflow", "scratch-own", "--target", "t"], "--workflow scratch-own needs --prompts"),
        (["--workflow", "base-builtin", "--target", "t"], "--workflow base-builtin needs --head"),
        (["--workflow", "own-head", "--target", "t", "--head", "h", "--prompts", "p"], "takes no --prompts"),
        (["--workflow", "scratch-builtin"], "needs --target"),
        (["--workflow", "scratch-builtin", "--target", "t", "--dataset", "gsm9k"], "did you mean gsm8k?"),
        ([], "needs either --workflow or --recipe"),
        (["--recipe", "RECIPE", "--target", "t"], "--target belongs to --workflow"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--recipe", "RECIPE", "--set", "vocabulry=5"], "vocabulry: Extra inputs are not permitted (got 5), did you"),
        (["--recipe", "RECIPE", "--set", "generate.nosuch.key=5"], "generate.nosuch: Extra inputs are not permitted"),
        (["--recipe", "RECIPE", "--set", "target.x=5"], "goes through 'target', which is a value"),
        (["--recipe", "RECIPE", "--set", "prompts.files.7=5"], "files has 1 entries"),
        (["--recipe", "RECIPE", "--set", "vocabulary"], "is not key=value"),
        (["--recipe", "RECIPE", "--set", "vocabulary={"], "is not YAML"),
        (["--recipe", "RECIPE", "--set", "vocabulary=many"], "vocabulary: Input should be a valid integer"),
        (["--recipe", "RECIPE", "--set", "limit_minutes=-1"], "limit_minutes: Input should be greater than 0"),
        (["--recipe", "RECIPE", "--set", "train.head.batch_token=1"], "did you mean batch_tokens?"),
        (["--recipe", "RECIPE", "--set", "prompts.files=[gone.jsonl]"], "prompts.files names gone.jsonl, which does"),
        (["--recipe", "RECIPE", "--set", "prompts={sets: [{name: gsm9k}]}"], "did you mean gsm8k?"),
        (
            ["--recipe", "RECIPE", "--set", "head=nowhere", "--set", "train={}"],
            "head is nowhere, which holds no config",
        ),
        (["--recipe", "RECIPE", "--set", "head=nowhere"], "wanted either train, with a name and keys of each training"),
        (["--recipe", "RECIPE", "--set", "train={}"], "found neither"),
        (
            ["--recipe", "RECIPE", "--set", "train.head.head={kind: dflash}", "--set", "package=true"],
            "train.head makes a block drafter, which the stages of package do not start servers with yet",
        ),
    ],
)
def test_a_wrong_job_is_refused_in_one_sentence_and_not_created(recipe, tmp_path, capsys, options, message) -> None:
    given = [str(recipe) if option == "RECIPE" else option for option in options]
    assert main(["optimize", "create", "one", "--jobs", str(tmp_path / "jobs"), *given]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err
    assert not (tmp_path / "jobs").exists()


def test_a_job_has_absolute_paths(tmp_path, tiny_target, monkeypatch) -> None:
    """So that it can be resumed from another folder; names stay names."""
    recipe = write_recipe(tmp_path, tiny_target, prompts={"files": ["chats.jsonl"]})
    monkeypatch.chdir(tmp_path)
    args = ["optimize", "create", "one", "--jobs", "jobs", "--recipe", recipe.name, "--no-start", "--set", "out=made"]
    assert main([*args, "--set", "train.head.head.from=smollm2-135m-instruct-eagle3"]) == 0
    made = yaml.safe_load((tmp_path / "jobs" / "one.yaml").read_text())
    assert made["out"] == str(tmp_path / "made") and made["prompts"]["files"] == [str(tmp_path / "chats.jsonl")]
    assert made["train"]["head"]["head"]["from"] == "smollm2-135m-instruct-eagle3"


def test_a_changed_value_changes_only_its_key() -> None:
    values = {"a": {"a": [1, {"b": 2}]}, "c": None}
    override_key(values, "a.a.1.b=3", UserError)
    override_key(values, "c.d=x", UserError)
    assert json.dumps(values) == '{"a": {"a": [1, {"b": 3}]}, "c": {"d": "x"}}'
