"""Prepares the P-EAGLE head that benchmarks/peagle.py measures."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eagle_plugin.heads.create import continue_as
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import trained_depths
from eagle_plugin.models.shipped import head_folder

SHIPPED = "smollm2-135m-instruct-peagle"
TRAINED = Path("out/head-peagle/head")  # by `make head KIND=peagle`
LAYERS = 2  # of an untrained head, as many as the recipe's


class PreparedHead(NamedTuple):
    """The P-EAGLE head of a run, as the servers get it."""

    folder: Path
    name: str
    is_trained: bool
    trained_levels: int | None = None  # by the record of its training


def default_head() -> Path:
    """The shipped P-EAGLE head, else the one of `make head KIND=peagle`."""
    shipped = head_folder(SHIPPED)
    return shipped if (shipped / "config.json").is_file() else TRAINED


def prepare_head(
    target: Path, eagle3: Path, peagle: Path | None, untrained: bool, copy: Path, levels: int
) -> PreparedHead:
    """The P-EAGLE head that the servers get; `copy` is written where it must differ from `peagle`. Raises HeadError.

    untrained: one with the tensors of the EAGLE-3 head and new masked features. A head whose record says that it was
    trained for fewer than `levels` would be served with so many only, so that its copy has no record.
    """
    if untrained:
        head = continue_as("peagle", load_any_head(eagle3, target), target, layers=LAYERS)
        save_head(head, copy, target_dir=target)
        return PreparedHead(copy, f"untrained, from {eagle3.name}", is_trained=False)
    assert peagle is not None
    folder = head_folder(peagle)
    if not (folder / "config.json").is_file():
        raise HeadError(
            f"there is no P-EAGLE head in {folder}; train one (make head KIND=peagle), name another folder "
            "(--peagle-head), or measure the draft time only (--untrained)"
        )
    head = load_any_head(folder, target)
    if head.kind != "peagle":
        raise HeadError(f"--peagle-head {folder} is a head of kind {head.kind}, wanted peagle; name another folder")
    trained = trained_depths(folder)
    if trained is None or trained >= levels:
        return PreparedHead(folder, folder.name, is_trained=True, trained_levels=trained)
    save_head(head, copy, target_dir=target)
    return PreparedHead(copy, folder.name, is_trained=True, trained_levels=trained)
