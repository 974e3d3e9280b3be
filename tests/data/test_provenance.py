"""Licences and terms: from a data set to the head that learnt from it, and what is refused."""

from __future__ import annotations

import json

import pytest
from job_worlds import write_recipe
from states_reports import states_report
from training_runs import extract_features, run_training, write_rows
from training_runs import recipe as training_recipe

from eagle_plugin.cli import main
from eagle_plugin.learning.data.provenance import (
    Terms,
    join_sources,
    license_of,
    read_sources,
    source_file,
    write_sources,
)
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.jobs.job_file import check_job
from eagle_plugin.learning.jobs.stages import list_stages
from eagle_plugin.learning.report.tables import source_tables
from eagle_plugin.learning.train.recipe import DataSettings
from eagle_plugin.learning.train.sources import StoreSource

DIALOGUES = [
    {"conversations": [{"from": "human", "value": f"Why is the number {k} blue?"},
                       {"from": "gpt", "value": f"Because {k} scatters the light of the evening. " * 3}]}
    for k in range(40)
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Exit code and messages of a command."""
    capsys.readouterr()
    code = main(list(map(str, args)))
    return code, capsys.readouterr().err


def test_from_a_data_set_to_a_package(tmp_path, tiny_target, capsys) -> None:
    """The answers of ShareGPT are refused until the user accepts their terms; the head and its card say so."""
    folder, chats, prompts, rows = (tmp_path / name for name in ("set", "chats.jsonl", "prompts.jsonl", "rows.jsonl"))
    folder.mkdir()
    (folder / "ShareGPT_V3_unfiltered_cleaned_split.json").write_text(json.dumps(DIALOGUES))
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: sharegpt-terms\n---\n# Card\n")
    assert run(capsys, "data", "set", "sharegpt", "--path", folder, "--out", chats)[0] == 0
    assert json.loads(source_file(chats).read_text())["records"] == len(DIALOGUES)
    terms = Terms("sharegpt-terms", trains_models=False, answers_only=True)
    assert read_sources(chats) == {"sharegpt": terms}

    prepare = ("data", "prepare", chats, "--privacy", "off", "--val-share", "0.2", "--out", prompts)
    code, err = run(capsys, *prepare, "--keep-responses")
    assert code == 2 and "terms of the source sharegpt forbid" in err and "--accept-terms sharegpt" in err
    assert not prompts.exists()
    code, err = run(capsys, *prepare, "--allow-licenses", "MIT", "apache-2.0")
    assert code == 2 and "the source sharegpt has the licence sharegpt-terms, wanted one of MIT, apache-2.0" in err
    assert run(capsys, *prepare)[0] == 0  # the questions alone
    assert read_sources(prompts) == {"sharegpt": Terms("sharegpt-terms")}
    accepted = {"sharegpt": Terms("sharegpt-terms", trains_models=False, answers_only=True, accepted=True)}
    assert run(capsys, *prepare, "--keep-responses", "--accept-terms", "sharegpt")[0] == 0
    assert read_sources(prompts) == accepted

    assert run(capsys, "data", "render", prompts, "--target", tiny_target, "--out", rows)[0] == 0
    assert read_sources(rows) == accepted and '"source":"sharegpt"' in rows.read_text()
    store = extract_features(rows, tiny_target, tmp_path / "store")
    assert FeatureStore(store).terms() == accepted
    head = run_training(tmp_path, "run", training_recipe(tiny_target, store)) / "head"
    training = json.loads((head / "eagle_plugin.json").read_text())["training"]
    (counted,) = training["sources"].values()
    learnt = [entry for entry in FeatureStore(store).entries if entry.split == "train"]
    assert counted == {
        "documents": len(learnt), "tokens": sum(entry.length for entry in learnt),
        "response_tokens": sum(entry.n_response for entry in learnt),
        "license": "sharegpt-terms", "trains_models": False, "accepted": True,
    }  # fmt: skip
    assert training["target_license"] == "unknown" and training["earlier_sources"] == {}
    package = tmp_path / "package"
    assert run(capsys, "package", tiny_target, head, "--engine", "sglang", "--out", package)[0] == 0
    card = (package / "README.md").read_text()
    assert (
        f"| sharegpt | {len(learnt)} | {counted['response_tokens']:,} | sharegpt-terms | accepted by the user |" in card
    )
    assert json.loads((package / "package.json").read_text())["head"]["training"]["sources"] == training["sources"]

    # Trained further on other rows, the head still says what it learnt from before.
    other = extract_features(write_rows(tmp_path / "o.jsonl", 24), tiny_target, tmp_path / "other")
    values = training_recipe(tiny_target, other, head={"from": str(head)})
    again = json.loads((run_training(tmp_path, "again", values) / "head" / "eagle_plugin.json").read_text())["training"]
    assert again["earlier_sources"] == training["sources"] and list(again["sources"]) == ["test"]


def test_a_store_of_earlier_versions_is_of_unknown_licences(tmp_path, tiny_target, capsys) -> None:
    store = extract_features(write_rows(tmp_path / "rows.jsonl", 24), tiny_target, tmp_path / "store")
    assert not (store / "source.json").exists() and FeatureStore(store).terms() == {"test": Terms()}
    recipe = tmp_path / "recipe.json"  # JSON is YAML
    recipe.write_text(json.dumps(training_recipe(tiny_target, store, budget={"updates": 1})))
    train = ("train", recipe, "--out", tmp_path / "run")
    code, err = run(capsys, *train, "--allow-licenses", "MIT")
    assert code == 2 and "the source test has the licence unknown, wanted one of MIT" in err and err.count("\n") == 1
    (store / "source.json").write_text(json.dumps({"sources": {"test": {"license": "MIT", "trains_models": False}}}))
    code, err = run(capsys, *train, "--allow-licenses", "mit")
    assert code == 2 and "the terms of the source test forbid" in err
    assert run(capsys, *train, "--allow-licenses", "mit", "--accept-terms", "test")[0] == 0
    for broken, message in (
        ("{", "source.json is not JSON"),
        ('{"sources": {"a": {"licence": "x"}}}', "sources.a.licence"),
    ):
        (store / "source.json").write_text(broken)
        code, err = run(capsys, *train, "--restart")
        assert code == 2 and message in err and err.count("\n") == 1, err


def test_documents_without_a_record_make_their_source_unknown(tmp_path, tiny_target) -> None:
    """A store that gets rows of one source from two files, of which one says its licence, in either order."""
    plain, told = (write_rows(tmp_path / f"{name}.jsonl", 12, seed=seed) for seed, name in enumerate(("plain", "told")))
    write_sources(told, {"test": Terms("mit", True)})
    for order in ((plain, told), (told, plain)):
        store = tmp_path / f"store-{order[0].stem}"
        for rows in order:
            extract_features(rows, tiny_target, store)
        assert FeatureStore(store).terms() == {"test": Terms("mit AND unknown")}
    alone = extract_features(told, tiny_target, tmp_path / "told")
    settings = [DataSettings.model_validate({"store": stores}) for stores in ([str(alone)], [str(alone), str(store)])]
    one, two = (StoreSource(tiny_target, of) for of in settings)
    assert one.terms == {"test": Terms("mit", True)} and two.terms == {"test": Terms("mit AND unknown")}


def test_options_state_what_no_file_says(tmp_path, capsys) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(one) + "\n" for one in DIALOGUES))
    prepare = ("data", "prepare", chats, "--privacy", "off", "--out", tmp_path / "prompts.jsonl", "--source", "ours")
    assert run(capsys, *prepare)[0] == 0 and not source_file(tmp_path / "prompts.jsonl").exists()
    assert run(capsys, *prepare, "--license", "CC0-1.0", "--allow-licenses", "cc0-1.0")[0] == 0
    assert read_sources(tmp_path / "prompts.jsonl") == {"ours": Terms("CC0-1.0")}
    code, err = run(capsys, *prepare, "--forbids-training")
    assert code == 2 and "the terms of the source ours forbid" in err
    source_file(chats).write_text("[]")
    code, err = run(capsys, *prepare)
    assert code == 2 and "holds a JSON list, wanted an object" in err and err.count("\n") == 1


# Aliases of aliases: as a text 10^5 words, and with four lines more 10^9.
LAUGHS = "a0: &a0 [mit]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 6))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "unknown"),
        ({"README.md": "---\nlicense: mit\n---\ntext"}, "mit"),
        ({"README.md": "---\nlicense: other\nlicense_name: llama3.3\n---\n"}, "llama3.3"),
        ({"README.md": "---\nlicense: [mit, cc-by-4.0]\n---\n"}, "mit AND cc-by-4.0"),
        ({"README.md": "---\nlicense: {name: mit}\n---\n"}, "unknown"),
        ({"README.md": f"---\n{LAUGHS}license: *a5\n---\n"}, "unknown"),
        ({"README.md": "no front matter", "LICENSE": "MIT License\n\nCopyright"}, "mit"),
        (
            {"README.md": "---\nlicense: [\n---\n", "LICENSE": "  Apache License\n  Version 2.0, January 2004"},
            "apache-2.0",
        ),
        ({"LICENSE.txt": "LLAMA 3.3 COMMUNITY LICENSE AGREEMENT\nmore"}, "LLAMA 3.3 COMMUNITY LICENSE AGREEMENT"),
        ({"eagle-manifest.json": '{"license": "Apache-2.0"}', "LICENSE": "MIT License"}, "Apache-2.0"),
    ],
)
def test_the_licence_of_a_folder(files, wanted, tmp_path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == wanted


def test_of_a_source_in_two_parts_holds_what_holds_for_both() -> None:
    free, closed, accepted = Terms("a", True), Terms("b", False), Terms("b", False, accepted=True)
    assert join_sources({"x": free}, {"x": free, "y": closed}) == {"x": free, "y": closed}
    assert free.joined(Terms("a")) == Terms("a", None)
    assert free.joined(closed) == Terms("a AND b", False)
    assert accepted.joined(closed) == closed and accepted.joined(free) == Terms("a AND b", False, accepted=True)


@pytest.mark.parametrize(
    ("keys", "name"),
    [({"prompts": {"sets": [{"name": "ultrachat"}]}}, "ultrachat"), ({"recorded": {"count": 5}}, "sharegpt")],
)
def test_a_job_is_refused_before_anything_is_downloaded(keys, name, tmp_path, tiny_target, capsys) -> None:
    path = write_recipe(tmp_path, tiny_target, **keys)
    create = ("optimize", "create", "one", "--jobs", tmp_path / "jobs", "--recipe", path, "--no-start")
    code, err = run(capsys, *create)
    assert code == 2 and f"the terms of the source {name} forbid" in err and err.count("\n") == 1
    assert run(capsys, *create, "--set", f"accept_terms=[{name}]")[0] == 0


def test_the_commands_of_a_job_get_what_its_recipe_says(tmp_path, tiny_target) -> None:
    job = check_job(
        {"target": str(tiny_target), "prompts": {"builtin": 5}, "train": {"a": {"budget": {"updates": 1}}}},
        ["allow_licenses=[MIT]", "accept_terms=[sharegpt]", "evaluate=[]", "benchmark=false", "package=false"],
        "the job",
    )  # fmt: skip
    told = [one.name for one in list_stages(job, tiny_target, tmp_path) if "--accept-terms" in one.args]
    assert told == ["prompts", "train a"]
    plain = check_job(job.model_dump(exclude={"allow_licenses", "accept_terms"}), [], "the job")
    assert not any("--a" in " ".join(one.args) for one in list_stages(plain, tiny_target, tmp_path))


def test_the_report_has_the_sources() -> None:
    heads = states_report().heads
    assert source_tables(heads) == []
    source = {"documents": 1200, "response_tokens": 9, "license": "mit", "trains_models": True}
    heads["trained"].training.update(target_license="llama3.3", sources={"a": source}, earlier_sources={"b": "wrong"})
    (table,) = source_tables(heads)
    assert table.rows == [("a", "1,200", "9", "mit", "none")] and "llama3.3" in table.caption
