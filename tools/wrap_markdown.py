"""Wrap the prose of Markdown files at 120 columns; code blocks, tables, headings and pictures stay as they are.

Usage: python tools/wrap_markdown.py FILE ...
"""

import re
import sys
import textwrap
from pathlib import Path

WIDTH = 120
FIXED = re.compile(r"\s*(?:\||#|!\[|<)")  # lines that cannot be wrapped
ITEM = re.compile(r"(\s*)((?:[-*]|\d+\.) )")


def wrap(text: str) -> str:
    """The text with every paragraph and list item wrapped anew."""
    out: list[str] = []
    paragraph: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        if paragraph and (fence or not line.strip() or FIXED.match(line) or ITEM.match(line)):
            out += _wrapped(paragraph)
            paragraph = []
        if fence or fenced or not line.strip() or FIXED.match(line):
            out.append(line)
        else:
            paragraph.append(line)
        fenced ^= fence
    return "\n".join(out).rstrip("\n") + "\n"


def _wrapped(lines: list[str]) -> list[str]:
    item = ITEM.match(lines[0])
    first = item[0] if item else re.match(r"\s*", lines[0])[0]  # type: ignore[index]  # it always matches
    body = " ".join([lines[0][len(first) :].strip(), *(line.strip() for line in lines[1:])])
    body = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), body)  # code is not broken
    rest = " " * len(first)
    wrapped = textwrap.wrap(
        body, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in wrapped]


def main() -> None:
    """The command line."""
    for path in map(Path, sys.argv[1:]):
        text = path.read_text("utf-8")
        if (wrapped := wrap(text)) != text:
            path.write_text(wrapped, "utf-8")


if __name__ == "__main__":
    main()
