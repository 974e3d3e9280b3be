"""benchmarks/targets.py: the table of docs/targets.md says what the rows say, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import CHANGES

from benchmarks.marked_table import END
from benchmarks.targets import BEGIN, KINDS, NAMES, ROOT, Row, served_table, write_document


def row(family: str, engine: str, head: str, served_by: str = "plugin", equal: bool | None = True) -> Row:
    return Row(family=family, engine=engine, head=head, served_by=served_by, greedy_equal=equal)


ROWS = [
    *(row("llama", engine, head) for engine in ("sglang", "vllm") for head in KINDS.values()),
    row("gemma3_text", "sglang", "EAGLE-3"),
    row("gemma3_text", "vllm", "EAGLE-3", "nobody", None),
    row("gemma3_text", "vllm", "EAGLE-2"),
    row("qwen3_next", "vllm", "EAGLE-3", "engine"),
    row("qwen2", "sglang", "EAGLE-3", equal=False),
    row("qwen2", "vllm", "EAGLE-3", "nobody", None),
]


def test_the_table_says_what_was_found() -> None:
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in served_table(ROWS).splitlines()[2:]}
    cells = {name: [part.strip(" |") for part in lines[f"| {title}"]] for name, title in NAMES.items()}
    assert cells["llama"] == ["EAGLE-3, P-EAGLE, EAGLE-2"] * 2
    assert cells["gemma3_text"] == ["EAGLE-3", "EAGLE-2"]
    assert cells["qwen3_next"] == ["not tried", "the engine's own worker"]
    assert cells["qwen2"] == ["**differs**", "does not start"]
    assert set(CHANGES) <= set(NAMES)


def test_only_the_table_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "targets.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n\n{END}\n\nafter\n")
    write_document(page, ROWS)
    assert page.read_text() == f"before\n\n{BEGIN}\n{served_table(ROWS)}\n{END}\n\nafter\n"
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place for the table"):
        write_document(page, ROWS)
    assert page.read_text() == "no place"
    assert BEGIN in (ROOT / "docs/targets.md").read_text()
