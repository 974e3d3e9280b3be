"""A release of an engine that does not exist: the installed one under another version, with names changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def make_release(
    installed: Path, package: str, version: str, folder: Path, renamed: Mapping[str, tuple[str, str]]
) -> Path:
    """A folder to put in front of the path of an interpreter; files that are not changed are links.

    installed: the folder of installed packages; renamed: by file in the package, what is called otherwise there.
    """
    shutil.copytree(installed / package, folder / package, copy_function=_link)
    for file, (old, new) in renamed.items():
        text = (installed / package / file).read_text("utf-8")
        if old not in text:
            raise ValueError(f"{package}/{file} has no {old}")
        folder.joinpath(package, file).unlink()
        folder.joinpath(package, file).write_text(text.replace(old, new), "utf-8")
    about = folder / f"{package}-{version}.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", "utf-8")
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())
