"""Every command in a document is read by the parser of the command that it names."""

from __future__ import annotations

import pytest
from document_commands import ROOT, commands_of, faults_of, parts_of, tracked_documents


def faults(text: str) -> list[str]:
    return [fault for args in commands_of(text) for fault in faults_of(args)]


@pytest.mark.parametrize("name", tracked_documents())
def test_every_command_is_one_that_exists(name: str) -> None:
    assert faults((ROOT / name).read_text("utf-8")) == []


def test_the_documents_have_commands() -> None:
    found = [args for name in tracked_documents() for args in commands_of((ROOT / name).read_text("utf-8"))]
    assert len([args for args in found if args[0] == "eagle-plugin"]) > 40
    assert len([args for args in found if args[0] == "make"]) > 15


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("eagle-plugin servee", "servee"),
        ("eagle-plugin serve --targett T", "--targett"),
        ("A=1 B=2 eagle-plugin data prepare chats.json", "--out"),
        ("curl -s URL | eagle-plugin explain", "SOURCE"),
        ("eagle-plugin optimize create x --flow y", "--flow"),
        ("eagle-plugin optimize created x", "--out"),
        ("eagle-plugin capture export F \\\n    --to G", "--out"),
        ("eagle-plugin models gett x", "gett"),
        ('export PORT=many\neagle-plugin serve --port "$PORT"', "many"),
        ("make demos", "no target demos"),
        ("make demo ENGIN=vllm", "no variable ENGIN"),
        ("make demo ARGS='--quik'", "--quik"),
        ("make bench ARGS='--repeats two'", "two"),
        ("python benchmarks/nothing.py", "benchmarks/nothing.py is not there"),
        ("python benchmarks/simulate.py --nothing", "--nothing"),
        ("pytest tests/test_nothing.py -k x", "tests/test_nothing.py is not there"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, fault: str) -> None:
    (found,) = faults(f"text\n\n```sh\n{command}\n```\n")
    assert fault in found


def test_what_is_no_command_is_not_read() -> None:
    log = "eagle-plugin 0.1.0: EAGLE3 is served by the plugin's draft trees\neagle-plugin: policy, 60 s"
    assert not list(commands_of(f"eagle-plugin nothing\n\n```\n{log}\n```\n\n```yaml\nmake: eagle-plugin\n```\n"))
    assert faults("```\neagle-plugin serve --help   # eagle-plugin nothing\npip install eagle-plugin\n```\n") == []


def test_a_block_has_its_title() -> None:
    text, block, rest = parts_of('a\n```sh title="in another terminal"\nb\nc\n```\nd')
    assert (text.text, block.language, block.title, block.text) == ("a", "sh", "in another terminal", "b\nc")
    assert rest.language is None and rest.text == "d"
