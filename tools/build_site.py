"""Builds the documentation site: docs/*.md, a few more pages and the help of every command, with Zensical.

`make docs` runs it. Nothing of the network is needed. The pages are copied, because those of docs/ have links to files
outside of it, and because one page is written by the commands themselves. A broken link, a link to a heading that is
not there, and a page without a place in the navigation end the build.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = "docs/zensical.toml"
# Pages from outside of docs/: the file and its name on the site. A link to README.md leads to the overview.
MORE_PAGES = {
    "docker/README.md": "docker.md",
    "deploy/README.md": "stack.md",
    "compat/sglang-cpu/README.md": "sglang-cpu.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
OVERVIEW = {"README.md": "index.md"}
COMMANDS = "<!-- commands -->"  # in a page: here comes the help of every command
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


class SiteError(Exception):
    """The site cannot be built; the message is one sentence."""


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/site"), metavar="DIR", help="default: out/site")
    out = parser.parse_args().out
    try:
        build(ROOT, out)
    except SiteError as error:
        print(f"build_site: {error}", file=sys.stderr)
        return 1
    print(f"the site is in {out}; to read it with its search: python3 -m http.server --directory {out}")
    return 0


def build(root: Path, out: Path) -> None:
    """Build the site of a repository into the folder `out`, which is replaced as a whole.

    Raises:
        SiteError: a page or the navigation is wrong; what Zensical found was printed.
    """
    settings = (root / SETTINGS).read_text(encoding="utf-8")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as name:
        folder = Path(name)
        copied = copy_pages(root, folder / "pages")
        check_nav(nav_pages(tomllib.loads(settings)["project"]["nav"]), copied)
        (folder / "zensical.toml").write_text(settings, encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        if subprocess.run(command, cwd=folder).returncode != 0:
            raise SiteError("Zensical found faults in the pages; see above")
        if out.exists():
            shutil.rmtree(out)
        (folder / "site").rename(out)


def copy_pages(root: Path, pages: Path) -> set[str]:
    """Copy all pages and what they link to into the folder `pages`; returns the names of the pages on the site."""
    sources = {f"docs/{path.relative_to(root / 'docs').as_posix()}" for path in (root / "docs").rglob("*.md")}
    sources |= set(MORE_PAGES)
    for source in sorted(sources):
        text = (root / source).read_text(encoding="utf-8")
        if COMMANDS in text:
            text = text.replace(COMMANDS, command_help())
        files: set[str] = set()
        write(pages / site_name(source), with_site_links(text, source, root, files))
        for file in files:
            (pages / site_name(file)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, pages / site_name(file))
    return {site_name(source) for source in sources}


def command_help() -> str:
    """The help of every command as Markdown."""
    sys.path.insert(0, str(Path(__file__).parent))
    from command_help import all_help

    return all_help()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def site_name(file: str) -> str:
    """Where a file of the repository is on the site: `docs/a.md` is `a.md`, a file that is no page is in `files/`."""
    if file in MORE_PAGES or file in OVERVIEW:
        return MORE_PAGES.get(file) or OVERVIEW[file]
    return file.removeprefix("docs/") if file.startswith("docs/") else f"files/{file}"


def with_site_links(text: str, source: str, root: Path, files: set[str]) -> str:
    """The page `source` with links that are right on the site; adds to `files` what is linked and no page.

    A link that leads nowhere stays as it is: Zensical finds it.
    """

    def replace(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", match[2]):
            return match[0]
        name, mark, anchor = match[2].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if not (root / target).is_file():
            return match[0]
        if not target.endswith(".md"):
            files.add(target)
        link = posixpath.relpath(site_name(target), posixpath.dirname(site_name(source)) or ".")
        return f"{match[1]}{link}{mark}{anchor}{match[3]}"

    return "".join(part if is_code else with_bars(LINK.sub(replace, part)) for part, is_code in code_blocks(text))


def with_bars(text: str) -> str:
    """In code inside of a table the repository's viewer wants `\\|` for a bar, and Python-Markdown the bar alone."""
    row = re.compile(r"^\|.*$", re.MULTILINE)
    return row.sub(lambda line: re.sub(r"`[^`]+`", lambda span: span[0].replace("\\|", "|"), line[0]), text)


def code_blocks(text: str) -> Iterator[tuple[str, bool]]:
    """The text in parts: (part, whether it is a fenced code block)."""
    part: list[str] = []
    fenced = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("```"):
            if fenced:
                part.append(line)
                yield "".join(part), True
                part = []
            else:
                yield "".join(part), False
                part = [line]
            fenced = not fenced
        else:
            part.append(line)
    yield "".join(part), fenced


def nav_pages(nav: list[Any]) -> list[str]:
    """The pages of a navigation, in its order."""
    found: list[str] = []
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += nav_pages(value) if isinstance(value, list) else [value]
    return found


def check_nav(nav: list[str], pages: set[str]) -> None:
    """SiteError unless the navigation has every page once; Zensical does not look for this."""
    faults = [f"{page} is not in nav" for page in sorted(pages - set(nav))]
    faults += [f"nav has {page}, which is no page" for page in sorted(set(nav) - pages)]
    faults += [f"nav has {page} twice" for page in sorted({page for page in nav if nav.count(page) > 1})]
    if faults:
        raise SiteError(f"{SETTINGS}: {'; '.join(faults)}; correct nav")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    sys.exit(main())
