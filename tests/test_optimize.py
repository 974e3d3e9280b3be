"""The whole job: prompts, answers from a stock engine, features, training, measurement."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from server_forks import ForkedServer

from eagle_plugin.cli import main
from eagle_plugin.common.errors import UserError
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.learning.jobs import runner
from eagle_plugin.learning.jobs.recipe import read_job
from eagle_plugin.learning.jobs.stages import data_stages, list_stages
from eagle_plugin.learning.train.recipe import parse_recipe
from eagle_plugin.models import get_model
from eagle_plugin.models.shipped import recipe_file

RECIPE = """\
target: smollm2-135m-instruct
prompts: {files: [PROMPTS]}
generate: {max_tokens: 24, temperatures: [0.0], concurrency: 4}
vocabulary: 512
train:
  base:
    budget: {updates: 2}
    batch_tokens: 256
    phases: [{steps: 1}]
    eval_tokens: 0
  longer:
    budget: {updates: 2}
    batch_tokens: 256
    phases: [{steps: 2}]
    eval_tokens: 0
evaluate: []
benchmark: false
package: false
"""
QUESTIONS = ("Name three rivers.", "What is a prime number?", "Why is the sky blue?", "Write a line of Python.")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    lines = (json.dumps({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS)
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("PROMPTS", str(folder / "chats.jsonl")))
    return path


@pytest.mark.server
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["tiny", "real"])
def test_a_job_makes_a_head_that_serves_its_target(real, recipe, tmp_path, capfd, tiny_target, monkeypatch):
    target, vocabulary = get_model("smollm2-135m-instruct") if real else tiny_target, 512 if real else 128
    if not real:
        text = recipe.read_text().replace("smollm2-135m-instruct", str(target))
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text.replace("vocabulary: 512", f"vocabulary: {vocabulary}"))
        monkeypatch.setattr(runner, "Server", ForkedServer)
    out = tmp_path / "out"
    assert main(["optimize", str(recipe), "--out", str(out), "--until", "features"]) == 0
    assert not (out / "train").exists()
    assert main(["optimize", str(recipe), "--out", str(out)]) == 0
    head = check_head(target, out / "head", algorithm="EAGLE3")
    assert head.draft_vocab_size == vocabulary
    assert (out / "head").resolve() == (out / "train" / "longer" / "head").resolve()
    capfd.readouterr()
    assert main(["optimize", str(recipe), "--out", str(out)]) == 0
    logged = capfd.readouterr().err
    assert logged.count("done before") == 6, logged


def test_the_stages_are_in_order_and_name_each_others_files(recipe, tmp_path):
    stages = list_stages(read_job(recipe), tmp_path / "target", tmp_path)
    names = [stage.name for stage in stages]
    assert names == [
        "prompts", "answers of the target", "vocabulary", "features of generated rows", "train base", "train longer",
    ]  # fmt: skip
    made = {str(stage.output) for stage in stages}
    assert str(tmp_path / "prompts.jsonl") in made and str(tmp_path / "prompts.jsonl") in stages[1].args
    assert f"from: {tmp_path / 'train' / 'base' / 'head'}" in stages[-1].recipe
    assert [stage.needs_server for stage in stages] == [False, True, False, False, False, False]


def test_online_servers_take_the_place_of_the_features_and_of_the_engine(recipe, tmp_path):
    path, online = tmp_path / "recipe.yaml", {"servers": ["http://a:1", "http://b:1"], "store": "/dev/shm/states"}
    path.write_text(recipe.read_text() + f"online: {json.dumps(online)}\n")
    stages = list_stages(read_job(path), tmp_path / "target", tmp_path)
    assert [stage.name for stage in stages] == [
        "prompts", "answers of the target", "vocabulary", "train base", "train longer",
    ]  # fmt: skip
    assert stages[1].args[-4:] == ["--endpoint", "http://a:1", "--endpoint", "http://b:1"]
    assert not any(stage.needs_server for stage in stages)
    for stage in stages[3:]:
        data = parse_recipe(yaml.safe_load(stage.recipe), "a stage").data
        assert data.rows == [tmp_path / "generated.jsonl"] and not data.store
        assert data.online is not None and data.online.servers == online["servers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("evaluate: []", "online: {servers: u, store: s}"), "wanted a URL or a folder from the root on: EAGLE"),
        (("evaluate: []", "online: {servers: u, store: /s}\naux_layers: [1]"), "online has the aux layers of the head"),
        (("vocabulary: 512", "vocabulary: -1"), "vocabulary: Input should be greater than 0 (got -1)"),
        (("evaluate: []", "evalute: []"), "evalute: Extra inputs are not permitted"),
        (("target: smollm2-135m-instruct\n", ""), "target: Field required"),
        (("prompts: {files", "prompts: {builtin: 5, files"), "prompts name both files and builtin"),
        (("prompts: {files", "prompts: {skip: 5, files"), "prompts.skip is 5, and only built-in prompts can be left"),
        (("evaluate: []", "evalute: []"), "did you mean evaluate?"),
        (("evaluate: []", "evaluate: [gsm9k]"), "evaluate names 'gsm9k', wanted of mtbench, humaneval, gsm8k, did you "
                                                "mean gsm8k?"),
        (("evaluate: []", "compare: nosuch"), "compare is nosuch, which holds no config.json"),
        (("    phases: [{steps: 1}]", "    batch_token: 5"), "train.base has 1 wrong key(s): batch_token: Extra inputs "
                                                             "are not permitted (got 5), did you mean batch_tokens?"),
        (("    phases: [{steps: 1}]", "    data: {store: recorded}"), "store names 'recorded', wanted of generated"),
        (("    phases: [{steps: 1}]", "    data: generated"), "train.base.data is 'generated', wanted a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_refused_by_its_key(recipe, tmp_path, change, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.read_text().replace(*change))
    with pytest.raises(UserError) as refusal:
        list_stages(read_job(path), tmp_path, tmp_path)
    assert message in str(refusal.value)


def test_a_stage_that_is_not_there_is_refused_before_the_target_is_looked_for(recipe, tmp_path, capsys):
    recipe = Path(recipe).read_text().replace("smollm2-135m-instruct", "a-target-that-is-not-there")
    (tmp_path / "recipe.yaml").write_text(recipe)
    out = tmp_path / "out"
    assert main(["optimize", str(tmp_path / "recipe.yaml"), "--out", str(out), "--until", "nostage"]) == 2
    printed = capsys.readouterr().err
    assert (
        "--until nostage is no stage of this recipe" in printed and "features of generated rows, train base" in printed
    )
    assert not out.exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in Path("examples/recipes").glob("*.yaml")))
def test_the_shipped_recipes_are_read(tmp_path, name):
    job = read_job(recipe_file(name))
    names = [stage.name for stage in list_stages(job, tmp_path, tmp_path)]
    assert names[-5:] == ["check", "evaluate", "benchmark", "report", "package"]
    assert job.compare is not None and (job.compare / "model.safetensors").is_file()  # by its name


def test_the_shipped_recipes_share_the_stages_before_training(tmp_path):
    """So that a second head needs no second answers and features."""
    jobs = [read_job(path) for path in sorted(Path("examples/recipes").glob("*.yaml"))]
    first, second = (list(data_stages(job, tmp_path, tmp_path)) for job in jobs)
    assert first == second and len(first) == 3


def test_data_and_head_have_folders_of_their_own(recipe, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    stages = list_stages(read_job(recipe), tmp_path / "target", out, data)
    assert [stage.output.is_relative_to(data) for stage in stages] == [True] * 4 + [False] * 2
    assert all(stage.output.is_relative_to(out) for stage in stages[4:])
    assert f"- {data / 'features' / 'generated'}" in stages[4].recipe and str(data / "vocab") in stages[4].recipe


def test_minutes_replace_the_budget(recipe, tmp_path):
    stages = list_stages(read_job(recipe), tmp_path, tmp_path, minutes=3)
    runs = [stage.recipe for stage in stages if stage.recipe]
    assert len(runs) == 2 and all("budget:\n  minutes: 1.5\n" in run and "updates" not in run for run in runs)


def test_a_second_job_uses_the_data_of_the_first_and_a_killed_one_goes_on(recipe, tmp_path, tiny_target, monkeypatch):
    """Stages that write their file and do nothing else; one is killed the first time."""
    ran, killed = [], ["train longer"]

    def call(args, name, log, watch, module):
        ran.append(name)
        if name in killed:
            killed.remove(name)
            raise KeyboardInterrupt
        stage = next(stage for stage in stages if stage.name == name)
        stage.output.parent.mkdir(parents=True, exist_ok=True)
        stage.output.write_text(name)

    monkeypatch.setattr(runner, "call", call)
    monkeypatch.setattr(runner, "_endpoint", lambda *args: contextlib.nullcontext([]))
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    text = recipe.read_text().replace("smollm2-135m-instruct", str(tiny_target))
    first.write_text(text)
    second.write_text(text.replace("  base:", "  other:"))
    data, codes = tmp_path / "data", []
    for path, name in ((first, "a"), (first, "a"), (second, "b"), (second, "b")):
        stages = list_stages(read_job(path), tiny_target, tmp_path / name, data)
        codes.append(main(["optimize", str(path), "--data", str(data), "--out", str(tmp_path / name)]))
    before = ["prompts", "answers of the target", "vocabulary", "features of generated rows"]
    assert codes == [130, 0, 0, 0]
    assert ran == [*before, "train base", "train longer", "train longer", "train other", "train longer"]
    assert (tmp_path / "a" / "head").read_text() == "train longer"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_minutes_are_a_positive_number(recipe, tmp_path, value, capsys):
    with pytest.raises(SystemExit):
        main(["optimize", str(recipe), "--out", str(tmp_path / "out"), "--minutes", value])
    assert f"{value} is not a number of minutes above 0" in capsys.readouterr().err
