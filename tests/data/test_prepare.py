"""`eagle-plugin data prepare`: every record is written or counted with a reason, and no private value is printed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models

from eagle_plugin.learning.data.prepare import main, prepare
from eagle_plugin.learning.data.privacy.filter import PRIVATE, UNDECODED, PrivacyFilter, PrivacySettings, RawPrompt
from eagle_plugin.learning.data.privacy.scanner import Scanner
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.prompts import Prompt, read_prompts
from eagle_plugin.learning.data.sources.record_files import CUT

MAIL = "anna.berg@firma.de"
KEY = "gh" + "p_" + "aB3dE6gH9" * 4


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "login", "arguments": json.dumps({"password": "vT9#kLq2!x"})},
}
RECORDS = [
    chat(user("Hi")),
    chat(user("Hi")),
    chat(user([{"type": "image_url", "image_url": {"url": "x"}}])),
    chat(user(f"Write to {MAIL}"), temperature=0.5),
    chat(user("Write to bernd@firma.de")),
    chat(
        user("Log me in"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ),
    *(chat(user(f"What is {i} times {i}?")) for i in range(200)),
]


def run(file: str, tmp_path: Path, mode: str = "drop", **options: Any) -> tuple[list[Prompt], Any]:
    out = tmp_path / "out.jsonl"
    summary = prepare([file], out, PrivacySettings(mode), **options)
    return list(read_prompts(out)), summary


def test_drop_leaves_private_prompts_out_and_counts_everything(
    scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path
):
    prompts, summary = run(write_lines(*RECORDS), tmp_path)
    assert summary.skipped == {"duplicate": 1, "multimodal content": 1, PRIVATE: 3}
    assert summary.read == len(RECORDS) == summary.kept.total() + summary.skipped.total()
    assert summary.found == {"EMAIL": 2, "SECRET": 1} and summary.first[PRIVATE].endswith("prompts.jsonl:4")
    assert len(prompts) == len({prompt.id for prompt in prompts}) == 201
    assert {prompt.split for prompt in prompts} == {"train", "val"}


def test_redact_keeps_the_structure(scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path):
    prompts, summary = run(write_lines(*RECORDS), tmp_path, "redact")
    texts = [prompt.messages[0]["content"] for prompt in prompts if prompt.messages]
    # The two e-mail prompts differ in the address alone: redacted they are one.
    assert texts.count("Write to <EMAIL_1>") == 1 and summary.skipped["duplicate"] == 2
    (tools,) = (prompt.messages for prompt in prompts if prompt.messages and len(prompt.messages) == 3)
    assert tools[1]["tool_calls"][0]["function"] == {"name": "login", "arguments": {"password": "<SECRET_1>"}}
    assert tools[2]["tool_call_id"] == "c1" and tools[2]["name"] == "login"
    assert MAIL not in (tmp_path / "out.jsonl").read_text()


def test_report_and_off_change_nothing(scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path):
    file = write_lines(*RECORDS)
    reported, summary = run(file, tmp_path, "report")
    untouched, silent = run(file, tmp_path, "off")
    assert reported == untouched and len(reported) == 204
    assert (summary.private, silent.private) == (3, 0)


def test_workers_give_the_same_file(scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path):
    file = write_lines(*RECORDS * 2)
    alone = run(file, tmp_path, "redact")
    data = (tmp_path / "out.jsonl").read_bytes()
    assert run(file, tmp_path, "redact", workers=2) == alone
    assert (tmp_path / "out.jsonl").read_bytes() == data


@pytest.mark.parametrize("mode", ["drop", "report"])
def test_the_report_names_types_never_values(
    mode: str, scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    file = write_lines(*RECORDS, chat(user(f"token {KEY}")))
    assert main([file, "--out", str(tmp_path / "o.jsonl"), "--privacy", mode, "--workers", "1"]) == 0
    printed = "".join(capfd.readouterr())
    assert "EMAIL found" in printed and "GITHUB_TOKEN found" in printed and "multimodal content" in printed
    for value in (MAIL, KEY, "vT9#kLq2!x", "Write to"):
        assert value not in printed


def test_what_was_served_is_kept_token_for_token(scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path):
    def capture(text: str, answer: str) -> dict[str, Any]:
        response = {"text": answer, "token_ids": [7, 8], "finish_reason": "stop"}
        return {"v": 1, "id": "1", "request": chat(user(text)), "response": response, "prompt_token_ids": [1, 2]}

    file = write_lines(capture("Hi", "Hello"), capture("Who?", f"Ask {MAIL}"))
    kept, _ = run(file, tmp_path, "redact", keep_responses=True)
    # Clean: the ids. Redacted: the text, since the ids still hold the address.
    assert (kept[0].prompt_ids, kept[0].response) == ([1, 2], {"token_ids": [7, 8], "finish": "stop"})
    assert kept[1].messages == [user("Who?"), {"role": "assistant", "content": "Ask <EMAIL_1>"}]
    assert [prompt.messages for prompt in run(file, tmp_path)[0]] == [[user("Hi")], [user("Who?")]]


def test_token_ids_are_read_with_the_tokenizer_or_left_out(
    scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path
):
    words = Tokenizer(models.WordLevel({"write": 0, "to": 1, "b@firma.de": 2, "me": 3}, unk_token="me"))
    words.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="me").save_pretrained(tmp_path / "t")
    for ids, reason in (([0, 1, 2], PRIVATE), ([0, 1, 3], "")):
        raw = RawPrompt("f:1", Prompt("", "completions", prompt_ids=ids))
        assert PrivacyFilter(PrivacySettings("redact", tokenizer=str(tmp_path / "t"))).apply(raw).reason == reason
        assert PrivacyFilter(PrivacySettings("redact")).apply(raw).reason == UNDECODED
        # What was served, which can have more than its text: a model's reasoning that the client did not ask for.
        served = Prompt("", "capture", prompt_ids=[3], response={"token_ids": ids})
        both = RawPrompt("f:1", Prompt("", "capture", messages=[user("Hi")]), served)
        kept = PrivacyFilter(PrivacySettings("redact", tokenizer=str(tmp_path / "t"))).apply(both).prompt
        assert kept == (both.prompt if reason else served)
    with pytest.raises(DataError, match="--tokenizer .* holds no tokenizer"):
        PrivacyFilter(PrivacySettings("drop", tokenizer=str(tmp_path / "nowhere")))


def test_a_cut_file_is_read_up_to_the_cut_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "cut.json"
    file.write_text(json.dumps(RECORDS, indent=1)[:-9])
    assert main([str(file), "--out", str(tmp_path / "o.jsonl"), "--privacy", "off"]) == 0
    printed = " ".join(capfd.readouterr().err.split())
    assert "warning: " in printed and CUT in printed
    assert len(list(read_prompts(tmp_path / "o.jsonl"))) == 203


def test_the_output_is_written_whole_or_not_at_all(write_lines: Callable[..., str], tmp_path: Path):
    out = tmp_path / "out" / "o.jsonl"
    good = write_lines(*RECORDS, name="good.jsonl")
    bad = write_lines(*RECORDS, {"conversations": [{"from": "human", "value": "Hi"}]}, name="bad.jsonl")
    prepare([good], out, PrivacySettings("off"))
    before = out.read_bytes()
    for files in ([bad], [good, bad], [write_lines({"messages": [{"role": "system", "content": "x"}]}, name="none")]):
        with pytest.raises(DataError):
            prepare(files, out, PrivacySettings("off"))
    assert out.read_bytes() == before and os.listdir(out.parent) == ["o.jsonl"]
    with pytest.raises(DataError, match="is one of the files to read"):
        main([good, "--out", good])
    with pytest.raises(DataError, match="--val-share is 1.0"):
        main([good, "--out", str(out), "--val-share", "1"])
    with pytest.raises(DataError, match="no prompt is left of 1 records: 1 no user turn"):
        prepare([write_lines({"messages": [{"role": "system", "content": "x"}]})], out, PrivacySettings("off"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("- <&-", "error: the standard input is closed; give files of prompts"),
        ("/proc/self/mem", "error: /proc/self/mem cannot be read (Input/output error); copy the file again"),
        ("/dev/zero", "error: /dev/zero:1 is longer than 64 MiB, wanted one record per line; split that line"),
    ],
)
def test_what_cannot_be_read_is_not_called_a_fault_of_the_output(command: str, message: str, tmp_path: Path):
    call = f"{sys.executable} -m eagle_plugin.cli data prepare --privacy off --out {tmp_path}/o.jsonl {command}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == message
    assert os.listdir(tmp_path) == []


def test_broken_lines_are_refused_or_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    file, out = tmp_path / "capture.jsonl", str(tmp_path / "o.jsonl")
    file.write_text("".join(json.dumps(chat(user(f"question {i}"))) + "\n{broken\n" for i in range(30)))
    command = [str(file), "--privacy", "off", "--out", out]
    with pytest.raises(DataError, match="capture.jsonl:2 is not JSON .* leave such records out with --skip-broken"):
        main(command)
    assert main([*command, "--skip-broken"]) == 0
    assert re.search(r"left out: line that is not JSON │ *30 *│ capture.jsonl:2", capfd.readouterr().err)
    assert len(list(read_prompts(out))) == 30


def test_stdin_and_a_name_for_the_source(write_lines: Callable[..., str], tmp_path: Path):
    command = [sys.executable, "-m", "eagle_plugin.learning.data.prepare", "-", "--privacy", "off", "--out", "o.jsonl"]
    with open(write_lines(*RECORDS)) as file:
        subprocess.run([*command, "--source", "support"], stdin=file, cwd=tmp_path, check=True, capture_output=True)
    assert {prompt.source for prompt in read_prompts(tmp_path / "o.jsonl")} == {"support"}


def test_ctrl_c_leaves_no_process_and_no_file(scanner: Scanner, tmp_path: Path):
    """Interrupted while it waits for more of its input, with two workers up."""
    command = [sys.executable, "-m", "eagle_plugin.learning.data.prepare", "-", "--workers", "2", "--out", "o.jsonl"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
        text=True,
        # A shell starts background jobs, such as a test run, with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin and process.stderr
    for i in range(70):
        process.stdin.write(json.dumps(chat(user(f"question {i}"))) + "\n")
    process.stdin.flush()
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".o.jsonl.*")) and time.monotonic() < deadline:
        time.sleep(0.05)  # the output is opened once the workers are up
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    printed = process.stderr.read()
    assert "Traceback" not in printed and printed.endswith("stopped by Ctrl-C\n")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def test_a_dead_worker_is_an_error(
    scanner: Scanner, write_lines: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = "import os\ndef find(text):\n    os._exit(9) if 'poison' in text else None\n    return []\n"
    (tmp_path / "deadly.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="a worker process of the privacy filter died"):
        prepare(
            [write_lines(chat(user("poison")))], tmp_path / "o.jsonl", PrivacySettings("drop", "deadly:find"), workers=2
        )
    assert not (tmp_path / "o.jsonl").exists()
