"""The files of a capture: rotation, the size limit, permissions, and what a killed writer leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from captured_traffic import answered, chat, exchange

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.traffic import segments
from eagle_plugin.learning.data.traffic.command import main
from eagle_plugin.learning.data.traffic.segments import COUNTS, SegmentWriter, counts_of, segments_of
from eagle_plugin.learning.data.traffic.writer import TrafficWriter

LINE = b'{"v":1,"time":%d,"request":{"prompt":"%s"},"response":{"text":"A"}}\n'


def line(number: int, size: int = 200) -> bytes:
    return LINE % (1_700_000_000 + number, b"x" * size)


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in segments_of(folder))


def test_segments_rotate_and_the_oldest_make_place(tmp_path: Path) -> None:
    writer, lines = SegmentWriter(tmp_path, limit=16_000), [line(number) for number in range(100)]
    for one in lines:
        writer.append(one)
        assert len(on_disk(tmp_path)) <= 16_000
    names = [path.name for path in segments_of(tmp_path)]
    assert len(names) > 8 and writer.removed > 5 and names == sorted(names)
    assert all(path.stat().st_size <= 1000 for path in segments_of(tmp_path))
    kept = on_disk(tmp_path)
    assert b"".join(lines).endswith(kept) and len(kept) > 12_000  # the newest, whole and in order


def test_a_record_larger_than_a_segment_is_dropped(tmp_path: Path, filters: Any) -> None:
    """Others would have to make place for it: all of them, if it is as large as the limit."""
    writer = TrafficWriter(filters("drop"), SegmentWriter(tmp_path, limit=1_600_000))
    for size in (10, 150_000, 20):
        writer.write(exchange(chat("Tell me " + "more " * (size // 5)), answered("Yes")))
    assert writer.counts["records"] == 2 and writer.counts["dropped:too_large"] == 1
    assert on_disk(tmp_path).count(b"\n") == 2


def test_the_newest_of_a_writer_that_began_first_is_kept(tmp_path: Path) -> None:
    """Of two writers in one folder, of which one began a day earlier."""
    now = [1_700_000_000.0]
    first = SegmentWriter(tmp_path, 16_000, lambda: now[0])
    first.append(line(0))
    now[0] += 86_400
    second = SegmentWriter(tmp_path, 16_000, lambda: now[0])
    second._writer += "0"
    for number in range(1, 200):
        now[0] += 60
        (first, second)[number % 2].append(line(number))
    numbers = sorted(json.loads(one)["time"] - 1_700_000_000 for one in on_disk(tmp_path).splitlines())
    assert numbers[-1] == 199 and numbers[0] > 100
    assert len(numbers) >= 200 - numbers[0] - 4  # but for the rest of one segment, the newest of both


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path) -> None:
    now = [1_700_000_000.0]
    writer = SegmentWriter(tmp_path, 16_000, lambda: now[0])
    for number in range(100):
        now[0] -= 60
        writer.append(line(number))
    assert on_disk(tmp_path).endswith(line(99)) and line(0) not in on_disk(tmp_path)


def test_a_segment_that_a_network_file_system_has_lost_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(tmp_path, limit=16_000)
    writer.append(line(1))
    lost = writer._file

    def stale(file: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "fstat", stale)
        writer.append(line(2))
    writer.append(line(3))
    assert lost is not None and on_disk(tmp_path) == line(1) + line(2) + line(3) and len(segments_of(tmp_path)) == 2


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o770, True), (0o1777, True)])
def test_a_folder_into_which_others_may_write_is_refused(mode: int, refused: bool, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(DataError, match="others may write; run: chmod 700") if refused else nullcontext():
        SegmentWriter(folder, limit=16_000)


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SegmentWriter(tmp_path / "new", limit=16_000).append(line(1))
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "new").iterdir())
    assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_other_files_of_the_folder_are_left(tmp_path: Path) -> None:
    (tmp_path / "capture-notes.jsonl").write_text("mine")
    writer = SegmentWriter(tmp_path, limit=16_000)
    for number in range(100):
        writer.append(line(number))
    assert (tmp_path / "capture-notes.jsonl").read_text() == "mine"


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = SegmentWriter(tmp_path, limit=16_000), os.write
    writer.append(line(1))

    def fill(file: int, data: bytes) -> int:
        if len(data) > 60:
            return write(file, data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.os, "write", fill)
    with pytest.raises(OSError, match="No space"):
        writer.append(line(2, 0))
    monkeypatch.undo()
    writer.append(line(3))
    assert on_disk(tmp_path) == line(1) + line(3)


def test_what_another_server_removed_is_made_anew(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, limit=16_000)
    writer.append(line(1))
    segments_of(tmp_path)[0].unlink()
    writer.append(line(2))
    assert on_disk(tmp_path) == line(2)


ENDLESS = """
import sys
from pathlib import Path
from eagle_plugin.learning.data.traffic.segments import SegmentWriter
writer, number = SegmentWriter(Path(sys.argv[1]), 10**9), 0
while True:
    writer.append(b'{"v":1,"time":%d,"request":{"prompt":"%d"},"response":{"text":"A"}}\\n' % (number, number))
    number += 1
    if number == 1000:
        print("many", flush=True)
"""


def test_a_killed_writer_leaves_a_readable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "capture"
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"many\n"
        process.send_signal(signal.SIGKILL)
    (path,) = segments_of(folder)
    whole = path.read_bytes()
    with path.open("ab") as file:  # as if it had been killed inside a write
        file.write(b'{"v":1,"request"')
    assert status(folder, capsys)["records"] == whole.count(b"\n") >= 1000
    out = tmp_path / "out.jsonl"
    assert main(["export", str(folder), "--out", str(out)]) == 0
    assert out.read_bytes() == whole and out.stat().st_mode & 0o777 == 0o600


def status(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_status_tells_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two servers."""
    for number, counts in enumerate(({"filtered": 2, "dropped:opt_out": 1}, {"dropped:opt_out": 2})):
        writer = SegmentWriter(tmp_path, limit=16_000)
        writer._writer += f"{number}"
        writer._counts = tmp_path / f"capture-{number}{COUNTS}"
        writer.append(line(number * 60))
        writer.write_counts(counts)
    found = status(tmp_path, capsys)
    assert (found["records"], found["bytes"], found["segments"]) == (2, 2 * len(line(0)), 2)
    assert found["last"] - found["first"] == 60
    assert counts_of(tmp_path) == found["counts"] == {"filtered": 2, "dropped:opt_out": 3}
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "not recorded: opt_out" in shown and "2023-11-14 22:14:20 UTC" in shown


def test_folders_without_a_capture_are_refused(tmp_path: Path) -> None:
    for folder, wanted in ((tmp_path, "has no files of a capture"), (tmp_path / "x", "is not a folder")):
        with pytest.raises(DataError, match=wanted):
            main(["export", str(folder), "--out", str(tmp_path / "out")])
    SegmentWriter(tmp_path / "empty", limit=16_000)
    with pytest.raises(DataError, match="has no records yet"):
        main(["export", str(tmp_path / "empty"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
