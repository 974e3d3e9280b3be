"""Run several recipes one after another, each in a folder of its own: `torchrun training_ranks.py NAME.yaml ...`.

One named local.yaml runs with a fault: every process normalises its loss by its own rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from eagle_plugin.learning.train.command import train
from eagle_plugin.learning.train.distributed import Ranks, join_ranks
from eagle_plugin.learning.train.recipe import read_recipe
from eagle_plugin.learning.train.sources import open_source


class LonelyRanks(Ranks):
    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def main(files: list[Path]) -> None:
    # One group for all: a second one could find addresses of the first one that are still in use.
    with join_ranks("cpu", "ddp") as ranks:
        for file in files:
            settings = read_recipe(file)
            kind = LonelyRanks if file.stem == "local" else Ranks
            mine = kind(ranks.rank, ranks.world, ranks.device, settings.parallel)
            source = open_source(settings.target, settings.data, torch.float32, mine)
            out = file.with_suffix("")
            out.mkdir(exist_ok=True)
            assert train(settings, out, mine, source) == 0
            source.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Path(word) for word in sys.argv[1:]])
