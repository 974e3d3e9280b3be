"""The folder by which a server gets another head: requests are served once, and nothing in it ends the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.common.atomic_io import WriteError
from eagle_plugin.common.deploy_folder import ANSWER, FOLDER, REQUEST, SERVER, Served
from eagle_plugin.runtime import head_mailbox
from eagle_plugin.runtime.head_mailbox import HeadMailbox, MailboxError, check_folder, open_mailbox

SERVES = Served("sglang", "/models/t", "/heads/old", "EAGLE3")
LOGGER = logging.getLogger("mailbox")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "deploy"
    made.mkdir(mode=0o700)
    return made


def ask(folder: Path, head: str, number: str = "1") -> None:
    (folder / REQUEST).write_text(json.dumps({"id": number, "head": head}))


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def mailbox(folder: Path, exchange: Callable[[Path], None], **options: Any) -> HeadMailbox:
    return HeadMailbox(folder, SERVES, exchange, LOGGER, Clock(), **options)


def test_a_request_is_served_once(folder: Path) -> None:
    ask(folder, "/heads/of-a-server-before")
    taken: list[Path] = []
    box = mailbox(folder, taken.append)
    assert read(folder, SERVER)["head"] == "/heads/old"
    box.look()
    assert not taken and not (folder / ANSWER).exists()
    ask(folder, "/heads/new")
    for _ in range(3):
        box.look()
    assert taken == [Path("/heads/new")]
    assert read(folder, SERVER)["head"] == "/heads/new"
    answer = read(folder, ANSWER)
    assert (answer["id"], answer["error"]) == ("1", "") and answer["seconds"] >= 0


def test_a_head_that_cannot_be_taken_leaves_the_old_one(folder: Path) -> None:
    def fail(head: Path) -> None:
        raise RuntimeError("two\nlines")

    box = mailbox(folder, fail)
    ask(folder, "/heads/new", "2")
    box.look()
    assert read(folder, ANSWER)["error"] == "two lines"
    assert read(folder, SERVER)["head"] == "/heads/old"


@pytest.mark.parametrize("text", ["", "[]", "[" * 5000, '{"id": 1}', "\ud800"])
def test_a_damaged_request_changes_nothing(text: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    box = mailbox(folder, lambda head: pytest.fail("a damaged request was served"))
    (folder / REQUEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    box.look()
    assert "the head stays" in caplog.text and not (folder / ANSWER).exists()


def test_a_full_disk_does_not_end_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Path] = []
    box = mailbox(folder, taken.append)
    ask(folder, "/heads/new")

    def full(path: Path, lines: Any) -> None:
        raise WriteError(f"{path} cannot be written")

    monkeypatch.setattr(head_mailbox, "write_output", full)
    box.look()
    assert taken and "cannot be written" in caplog.text


def test_the_folder_is_looked_into_ten_times_per_second_at_most(folder: Path) -> None:
    clock, taken = Clock(), list[Path]()
    box = HeadMailbox(folder, SERVES, taken.append, LOGGER, lambda: clock.now)
    box.look()
    ask(folder, "/heads/new")
    clock.now += 0.05
    box.look()
    assert not taken
    clock.now += 0.06
    box.look()
    assert taken


def test_several_ranks_refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(folder))
    taken: list[Path] = []
    assert open_mailbox(SERVES, taken.append, LOGGER, rank=1, ranks=2) is None
    box = open_mailbox(SERVES, taken.append, LOGGER, rank=0, ranks=2)
    assert box is not None and read(folder, SERVER)["refuses"]
    ask(folder, "/heads/new")
    box.look()
    assert not taken and "several ranks" in read(folder, ANSWER)["error"]
    assert open_mailbox(SERVES, taken.append, LOGGER, refuses="a layer of its own") is not None
    assert read(folder, SERVER)["refuses"] == "a layer of its own"
    assert open_mailbox(SERVES, taken.append, LOGGER) is not None and read(folder, SERVER)["refuses"] == ""
    monkeypatch.delenv(FOLDER)
    assert open_mailbox(SERVES, taken.append, LOGGER) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.write_text(""), "is no folder"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "others may write"),
    ],
)
def test_a_folder_that_is_not_the_servers_own_is_refused_at_the_start(
    make: Callable[[Path], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deploy"
    make(path)
    monkeypatch.setenv(FOLDER, str(path))
    with pytest.raises(MailboxError, match=reason):
        check_folder()
