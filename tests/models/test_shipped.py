"""The heads that come with the plugin: beside it in a checkout, a distribution of their own elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_plugin import cli
from eagle_plugin.models import HEADS, ModelError, head_folder, heads_folder, shipped


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As outside of a checkout; a folder for packages that can be imported."""
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path / "eagle_plugin")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_checkout_has_its_heads() -> None:
    found = [path.name for path in heads_folder().iterdir() if (path / "config.json").is_file()]
    assert sorted(found) == sorted(HEADS)


def test_installed_heads_are_found(outside: Path) -> None:
    folder = outside / "eagle_plugin_heads" / HEADS[0]
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert head_folder(HEADS[0]) == folder


def test_heads_that_are_not_installed(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert head_folder("another") == Path("another")
    with pytest.raises(ModelError, match="are in the package eagle-plugin-heads, which is not installed"):
        head_folder(HEADS[1])
    cli.main(["models", "list"])
    assert capsys.readouterr().out.count("not installed") == len(HEADS)
