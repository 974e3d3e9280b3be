"""Time tree attention on this GPU with other tiles and numbers of splits than `tile_for` and `split_count` choose.

    python benchmarks/gpu/tiles.py [--nodes 16] [--tiles 64,64,4,3 128,64,4,2] [--splits 1 2 4]

The shapes are those of Llama-3-8B in bfloat16; a tile is rows, keys, warps and stages. Without options: the chosen tile
and the chosen splits. One line per tile and number of splits: microseconds of each batch and context, as kernels.py
takes them. A tile that does not fit is reported and left out. Without a CUDA device the exit code is 2.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.kernels import SHAPES, attention_rows, microseconds
from eagle_plugin.kernels import triton_attention, triton_tiles
from eagle_plugin.kernels.triton_tiles import Tile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16, help="nodes of a tree; four times as many query rows")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tiles", type=lambda text: Tile(*map(int, text.split(","))), nargs="+", default=[None])
    parser.add_argument("--splits", type=int, nargs="+", default=[None])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: torch finds no CUDA device, wanted one: run this on a machine with an NVIDIA GPU", file=sys.stderr
        )
        return 2
    for tile, splits in itertools.product(options.tiles, options.splits):
        with mock.patch.multiple(
            triton_attention,
            tile_for=(lambda *_, tile=tile: tile) if tile else triton_tiles.tile_for,
            split_count=(lambda *_, splits=splits: splits) if splits else triton_tiles.split_count,
        ):
            print(f"{tile or 'the chosen tile'}, splits {splits or 'as chosen'}:", flush=True)
            for row in attention_rows(SHAPES["llama-3-8b"], torch.bfloat16, options.batches, [options.nodes]):
                try:
                    print(f"  {row.case}: {microseconds(row.calls['ours']):.1f}", flush=True)
                except Exception as error:
                    print(f"  {row.case}: not run, {str(error).splitlines()[0]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
