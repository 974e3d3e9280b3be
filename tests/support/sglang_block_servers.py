"""SGLang's servers with a block drafter that note what it lists (`block_lists`), and models for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import block_lists
from bigram_models import bigram_target, spoken
from dflash_models import dflash_head, lend_tables
from sampling_requests import SETTINGS
from serving import serving, tiny_spec

from eagle_plugin.bench.servers import Server

BLOCK, SHAPE = 8, (4, 3, 12)
FLAGS = (*SETTINGS["extra_flags"], "--chunked-prefill-size", "16")
DFLASH = {"algorithm": "DFLASH", "name": "dflash"}
DSPARK = {"algorithm": "DSPARK", "name": "dspark"}


class Pair(NamedTuple):
    target: Path
    head: Path


def bigram_pair(folder: Path) -> Pair:
    """A drafter of three layers: three levels of what the target most likely says, with noise."""
    target = bigram_target(folder / "target")
    lend_tables(target, kept := spoken(target))
    return Pair(target, dflash_head(folder / "head", target, kept, wrong=0.03, own_tables=False, block=BLOCK))


class Served(NamedTuple):
    server: Server
    folder: Path  # of `block_lists`


def served(
    pair: Pair, folder: Path, dtype: str = "float32", kind: dict[str, str] = DFLASH, **environment: str
) -> Iterator[Served]:
    environment |= block_lists.install(folder)
    settings = SETTINGS | {"extra_flags": FLAGS, "environment": environment, "dtype": dtype}
    with serving([tiny_spec(pair.target, pair.head, SHAPE, **settings, **kind)], folder) as (running,):
        yield Served(running, folder)
