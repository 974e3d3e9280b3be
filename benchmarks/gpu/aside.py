"""Keep large files of the checkout out of what is sent to another machine with it, and take them back:

    python benchmarks/gpu/aside.py          # tracked files of 1 MiB and more go to out/aside, which git ignores
    python benchmarks/gpu/aside.py --back   # and back to their places

For a machine that takes the whole working tree in one call, of a limited size: the draft heads are most of it, and
what a GPU run needs of them is in the archives of benchmarks/gpu/portable.py. Until they are back, git shows them as
deleted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eagle_plugin.common.command_end import end_of

ROOT = Path(__file__).resolve().parents[2]
LARGE = 1 << 20  # bytes


def move_aside(root: Path, aside: Path) -> list[str]:
    """Move large tracked files away; their places in the checkout."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, text=True, capture_output=True, check=True).stdout
    moved = []
    for name in names.split("\0"):
        file = root / name
        if name and file.is_file() and file.stat().st_size >= LARGE:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            file.replace(aside / name)
            moved.append(name)
    return moved


def move_back(root: Path, aside: Path) -> list[str]:
    """Move them back."""
    moved = [str(file.relative_to(aside)) for file in sorted(aside.rglob("*")) if file.is_file()]
    for name in moved:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).replace(root / name)
    return moved


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--back", action="store_true", help="take them back")
    options = parser.parse_args(argv)
    moved = (move_back if options.back else move_aside)(ROOT, ROOT / "out/aside")
    print(f"{len(moved)} files moved {'back' if options.back else 'to out/aside'}: {', '.join(moved) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
