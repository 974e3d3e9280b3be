"""What is made from a file that only its user may read is readable by this user only."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from token_endpoint import TokenEndpoint

from eagle_plugin.learning.data.extract import main as extract
from eagle_plugin.learning.data.generate import main as generate
from eagle_plugin.learning.data.prepare import main as prepare
from eagle_plugin.learning.data.render import main as render
from eagle_plugin.learning.data.rows import TokenRow, format_row

OPEN = 0o022  # the usual umask


def others_may_read(folder: Path) -> dict[str, bool]:
    """Of each file and folder below."""
    return {str(path.relative_to(folder)): bool(path.stat().st_mode & 0o077) for path in folder.rglob("*")}


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_prompts_rows_journals_and_stores_have_the_rights_of_the_capture(
    mode: int, tiny_target: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of the light in the air."}]
    capture, token_rows, out = tmp_path / "capture.jsonl", tmp_path / "token_rows.jsonl", tmp_path / "out"
    capture.write_text(json.dumps({"messages": turns}) + "\n")
    token_rows.write_text(format_row(TokenRow("a", "chat", [1, 2, 3], [4, 5, 6], finish="stop", split="train")))
    for path in (capture, token_rows):
        path.chmod(mode)
    prompts = out / "prompts.jsonl"
    before = os.umask(OPEN)
    try:
        common = ["--privacy", "off", "--keep-responses", "--val-share", "0"]
        assert prepare([str(capture), *common, "--out", str(prompts)]) == 0
        with TokenEndpoint() as server:
            assert generate([str(prompts), "--endpoint", server.url, "--out", str(out / "generated.jsonl")]) == 0
        assert render([str(prompts), "--target", str(tiny_target), "--out", str(out / "rendered.jsonl")]) == 0
        settings = ["--dtype", "float32", "--device", "cpu"]
        assert extract([str(token_rows), "--target", str(tiny_target), "--store", str(out / "store"), *settings]) == 0
        assert os.umask(OPEN) == OPEN  # it is given back
    finally:
        os.umask(before)
    found = others_may_read(out)
    generated = {f"generated{end}" for end in (".jsonl", ".skipped.jsonl", ".model.json")}
    assert {"prompts.jsonl", *generated, "rendered.jsonl", "store"} <= set(found)
    assert len(found) == 9 and set(found.values()) == {mode == 0o644}
    assert stat.S_IMODE(capture.stat().st_mode) == mode
