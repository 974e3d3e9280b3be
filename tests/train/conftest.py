"""One tiny target with the features of some rows, for all tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from training_runs import extract_features, write_rows


class Features(NamedTuple):
    target: Path
    rows: Path
    store: Path


@pytest.fixture(scope="session")
def features(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Features:
    folder = tmp_path_factory.mktemp("features")
    rows = write_rows(folder / "rows.jsonl", 48)
    return Features(tiny_target, rows, extract_features(rows, tiny_target, folder / "store"))
