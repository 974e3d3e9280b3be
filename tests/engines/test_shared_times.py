"""Ranks that choose alike learn the times of rank 0: two gloo processes leave drafts in the same round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharing_ranks

from eagle_plugin.core.shape import PLAIN, Shape


def served(shares: bool, meeting: Path) -> list[list[Shape]]:
    script = Path(sharing_ranks.__file__)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(script.parents[2]), str(script.parent)]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(meeting), str(int(shares))],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    return [[Shape(*one) for one in json.loads(rank.communicate(timeout=300)[0])] for rank in ranks]


@pytest.mark.parametrize("shares", [True, False])
def test_all_ranks_leave_slow_drafts_in_the_same_round(shares: bool, tmp_path: Path) -> None:
    """Without it, the control, rank 1 knows no times and drafts on."""
    first, second = served(shares, tmp_path / "meeting")
    assert first[-100:].count(PLAIN) > 90
    assert (first == second) == shares
    assert (second[-100:].count(PLAIN) > 90) == shares
