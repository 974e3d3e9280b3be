"""The documentation site: built from this repository, whole, and without a request to another host."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import tomllib
from document_commands import ROOT

SPEC = importlib.util.spec_from_file_location("build_site", ROOT / "tools/build_site.py")
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)
# What a browser loads by itself. A link in the text (a) is followed by a reader only.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src",
          "audio": "src", "embed": "src", "object": "data", "form": "action"}  # fmt: skip
# The theme's script loads these from another host, where a page has them.
FETCHED = re.compile(r'class="[^"]*\b(?:mermaid|glightbox|arithmatex)\b|data-md-component="source"')
OTHER_HOST = re.compile(r"(?:[a-z]+:)?//(?!\s)")
IN_STYLES = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^)'\"]*)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "built"
    tool.build(ROOT, out)
    return out


class Page(HTMLParser):
    """loads: what the browser loads. links: where a reader can go. ids: what a link may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if LOADED.get(tag) in values:
            self.loads.append(values[LOADED[tag]])


def pages(site: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(site.rglob("*.html")):
        yield path, path.read_text("utf-8")


def foreign(text: str) -> list[str]:
    """What of a page comes from another host."""
    found = [address for address in Page(text).loads if OTHER_HOST.match(address)]
    return found + IN_STYLES.findall(text) + FETCHED.findall(text)


def test_no_page_asks_another_host(site: Path) -> None:
    found = {path.name: foreign(text) for path, text in pages(site)}
    assert len(found) > 20 and not any(found.values()), found
    styles = {path.name: IN_STYLES.findall(path.read_text("utf-8")) for path in site.rglob("*.css")}
    assert styles and not any(styles.values()), styles


@pytest.mark.parametrize(
    "text",
    [
        '<link rel="stylesheet" href="https://fonts.googleapis.com/css">',
        '<script src="//unpkg.com/x.js"></script>',
        '<img alt="" src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css'</style>",
        '<p style="background: url(https://example.org/a.png)">',
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_a_request_to_another_host_is_found(text: str) -> None:
    assert foreign(text) and not foreign('<a href="https://example.org">a link</a><img src="images/demo.png">')


def test_every_link_between_pages_leads_somewhere(site: Path) -> None:
    ids = {path.resolve(): Page(text).ids for path, text in pages(site)}
    missing = []
    for path, text in pages(site):
        page = Page(text)
        for link in page.links + page.loads:
            name, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", name) or path.name == "404.html":
                continue
            target = (path.parent / name).resolve() if name else path.resolve()
            if not target.is_file() or (anchor and target in ids and anchor not in ids[target]):
                missing.append((path.name, link))
    assert not missing


def test_every_document_is_in_the_navigation(site: Path) -> None:
    nav = tool.nav_pages(tomllib.loads((ROOT / tool.SETTINGS).read_text("utf-8"))["project"]["nav"])
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(nav)
    assert all((site / name).with_suffix(".html").is_file() for name in nav)


def test_the_commands_are_on_their_page(site: Path) -> None:
    text = (site / "commands.html").read_text("utf-8")
    assert 'id="eagle-plugin-data-features"' in text and "<code>--aux-layers" in text and "&lt;!--" not in text


def test_search_has_the_text_of_the_pages(site: Path) -> None:
    index = "".join(path.read_text("utf-8") for path in site.rglob("search*") if path.suffix in (".json", ".js"))
    assert "X-Eagle-Capture" in index


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages of this repository, to be changed."""
    monkeypatch.setattr(tool, "command_help", lambda: "")
    root = tmp_path / "repository"
    for name in ("docs", "examples/recipes"):
        shutil.copytree(ROOT / name, root / name)
    for name in (*tool.MORE_PAGES, *tool.OVERVIEW):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    return root


def add(name: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / name).open("a") as file:
            file.write(text)

    return change


def leave_out_of_nav(root: Path) -> None:
    settings = root / tool.SETTINGS
    settings.write_text(settings.read_text().replace('{ "Watch" = "watch.md" },', ""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add("docs/watch.md", "\n[no page](nothing.md)\n"), "faults"),
        (add("docs/watch.md", "\n[no heading](jobs.md#nothing)\n"), "faults"),
        (add("docs/new.md", "# New\n"), "new.md is not in nav"),
        (lambda root: (root / "docs/watch.md").unlink(), "nav has watch.md, which is no page"),
        (leave_out_of_nav, "watch.md is not in nav"),
    ],
)
def test_a_fault_ends_the_build_and_the_former_site_stays(
    change: Callable[[Path], None], message: str, repository: Path, tmp_path: Path
) -> None:
    change(repository)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("former")
    with pytest.raises(tool.SiteError, match=message):
        tool.build(repository, tmp_path / "site")
    assert [path.name for path in tmp_path.iterdir() if path.name != "repository"] == ["site"]
    assert (tmp_path / "site/index.html").read_text() == "former"


def test_links_are_those_of_the_site(tmp_path: Path) -> None:
    for name in ("docs/a.md", "docs/images/p.png", "README.md", "docker/README.md", "examples/r.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    files: set[str] = set()
    text = "[a](../README.md) [b](../docker/README.md#x) ![c](images/p.png) [d](../examples/r.yaml) [e](http://e)\n"
    code = "```\n[f](../README.md)\n```\n"
    made = tool.with_site_links(text + code + "| `a\\|b` | c \\| d |\n", "docs/a.md", tmp_path, files)
    assert made == (
        "[a](index.md) [b](docker.md#x) ![c](images/p.png) [d](files/examples/r.yaml) [e](http://e)\n"
        + code
        + "| `a|b` | c \\| d |\n"
    )
    assert files == {"docs/images/p.png", "examples/r.yaml"}
    assert tool.with_site_links("[a](../docs/a.md)", "docker/README.md", tmp_path, files) == "[a](a.md)"
