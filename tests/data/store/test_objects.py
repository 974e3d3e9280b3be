"""Objects on a disk, in memory and on a real S3 server: written whole, read by ranges, never replaced."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from object_server import s3_bucket

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store import objects
from eagle_plugin.learning.data.store.objects import PARTIAL, Folder, LocalFolder, ObjectExists, open_folder

SCHEMES = ("path", "file", "memory", "s3")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4()}"
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}/sub"
    return {"path": str(tmp_path / "a b"), "file": f"file://{tmp_path}/a%20b"}[request.param]


def test_objects_are_listed_read_by_ranges_and_never_replaced(url: str) -> None:
    folder: Folder = open_folder(url)
    assert folder.names() == []
    data = bytes(range(256)) * 40
    folder.create("b.bin", data)
    folder.create("a.json", b"{}")
    again = open_folder(url)
    assert again.names() == ["a.json", "b.bin"]
    assert again.read("b.bin") == data
    assert again.read("b.bin", 1000) == data[1000:]
    assert again.read("b.bin", 1000, 1010) == data[1000:1010]
    assert again.read("b.bin", len(data) - 4, len(data) + 100) == data[-4:]
    with pytest.raises(ObjectExists):
        again.create("b.bin", b"other")
    assert folder.read("b.bin") == data
    with pytest.raises(FileNotFoundError):
        folder.read("none")


def test_a_folder_below_is_not_listed(url: str) -> None:
    open_folder(url).create("here", b"1")
    open_folder(f"{url}/below").create("there", b"2")
    assert open_folder(url).names() == ["here"]


def test_a_missing_bucket_and_a_closed_port_are_one_sentence(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="check the bucket"):
        open_folder("s3://no-such-bucket/x").create("a", b"1")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="check the bucket"):
        open_folder(s3).names()


@pytest.mark.parametrize("given", [True, False])
def test_the_metadata_service_is_asked_only_without_credentials(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials of tests/conftest.py are enough: else a test waits for an address that only clouds have."""
    asked = []

    class Refuse(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            asked.append(self.path)
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_PUT = do_any

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    for name, value in {"AWS_ENDPOINT": here, "AWS_METADATA_ENDPOINT": here, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    if not given:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DataError, match="check the bucket"):
        open_folder("s3://bucket/x").names()
    server.shutdown()
    server.server_close()
    assert any("/latest/" in path for path in asked) == (not given)
    assert asked


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:9/features", "http://127.0.0.1:9/features", "ftp://", "sftp://a/b"])
def test_a_file_system_that_cannot_be_reached_is_one_sentence(url: str) -> None:
    with pytest.raises(DataError, match=r"^[^\n]+; [^\n]+$"):
        open_folder(url).create("a", b"1")


def test_an_unknown_scheme_and_a_file_in_the_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="use a path"):
        open_folder("nosuch://a/b")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="wanted a folder"):
        open_folder(tmp_path / "file").names()
    (tmp_path / "folder" / "name").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot read"):
        open_folder(tmp_path / "folder").read("name")


def test_a_file_system_without_links_keeps_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    folder = LocalFolder(tmp_path)
    folder.create("a", b"1")
    with pytest.raises(ObjectExists):
        folder.create("a", b"2")
    assert folder.read("a") == b"1"
    assert folder.names() == ["a"]


def test_what_a_killed_writer_left_is_not_listed_and_can_be_removed(tmp_path: Path) -> None:
    for prefix in ("shard-000-", "shard-001-"):
        (tmp_path / f".{prefix}7{PARTIAL}host-1").write_bytes(b"half")
    folder = LocalFolder(tmp_path)
    assert folder.names() == []
    folder.remove_partial("shard-000-")
    assert [path.name for path in tmp_path.iterdir()] == [f".shard-001-7{PARTIAL}host-1"]


def test_a_file_that_another_process_removes_while_a_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"12")

    def look_and_remove(entry: os.DirEntry[str], look: Any = objects._is_object) -> bool:
        found = look(entry)
        if entry.name == "b":
            os.unlink(entry)
        return bool(found)

    monkeypatch.setattr(objects, "_is_object", look_and_remove)
    assert objects.LocalFolder(tmp_path).sizes() == {"a": 2, "c": 2}
