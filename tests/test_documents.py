"""Documents wrap at one width, and what they link to exists."""

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("wrap_markdown", ROOT / "tools" / "wrap_markdown.py")
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def documents() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside code blocks."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if not fence and not fenced:
            yield number, line


def too_long(text: str) -> list[int]:
    """The numbers of the lines of prose that are too long; tables, headings and pictures cannot be wrapped."""
    return [number for number, line in prose(text) if len(line) > tool.WIDTH and not tool.FIXED.match(line)]


def anchors(text: str) -> set[str]:
    """What `#...` may name in a document: its headings, as GitHub writes them."""
    headings = [line.lstrip("#") for _, line in prose(text) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Links to files below the repository, or to headings, that are not there."""
    found = []
    for link in (match[1] for _, line in prose(text) for match in LINK.finditer(line)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name
        missing = not target.exists() if name else False
        if missing or (anchor and anchor not in anchors(target.read_text("utf-8") if name else text)):
            found.append(link)
    return found


@pytest.mark.parametrize("name", documents())
def test_prose_wraps_and_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert too_long(text) == []
    assert broken_links(text, (ROOT / name).parent) == []


def test_a_long_line_and_a_broken_link_are_found() -> None:
    long = "word " * 30
    assert too_long(f"short\n{long}\n\n```\n{long}\n```\n| {long} |\n") == [2]
    text = (
        "# A title, with `code`\n[a](README.md) [b](#a-title-with-code) [c](https://example.org)\n[d](#no) [e](no.md)\n"
    )
    assert broken_links(text, ROOT) == ["#no", "no.md"]


def test_wrapping_keeps_lists_and_code() -> None:
    long = "word " * 30
    text = f"# Title\n\n- {long}\n  more\n1. {long}\n\n```\n{long}\n```\n| {long}|\n"
    wrapped = tool.wrap(text)
    assert too_long(wrapped) == [] and wrapped.split() == text.split() and tool.wrap(wrapped) == wrapped
    assert f"```\n{long}\n```\n| {long}|\n" in wrapped
    assert wrapped.splitlines()[3].startswith("  word")
