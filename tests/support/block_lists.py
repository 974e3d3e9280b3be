"""A plugin for the test server: tells what a block drafter lists, and has faults in the way it is run.

Each round that drafts adds a line to the file `lists` of the folder, of its first request: the lists of all levels, or
of a drafter with a Markov head, whose nodes have their own, the nodes of the tree. The faults are named by the
file that EAGLE_TEST_FAULT points to, read at every round; "none" is the healthy drafter. The verifier has the faults of
broken_verifier.py too. Nothing may be captured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import broken_verifier
import torch
from dflash_reference import DFlashReference
from draft_paths import paths_of
from torch import Tensor

from eagle_plugin.runtime.round import TopM

choose = broken_verifier.choose


def causal_block(drafter: Any) -> dict[str, Any]:
    return {"_is_causal": True}


def other_mask(drafter: Any) -> dict[str, Any]:
    block = drafter.levels.block
    return {"levels": drafter.levels._replace(block=block._replace(mask=block.mask + 1))}


def shorter_block(drafter: Any) -> dict[str, Any]:
    block = drafter.levels.block
    return {"levels": drafter.levels._replace(block=block._replace(rows=block.rows - 1))}


def shifted_context(drafter: Any) -> dict[str, Any]:
    store = drafter._store
    return {"_store": lambda states, positions, slots: store(states.roll(1, dims=0), positions, slots)}


def shifted_positions(drafter: Any) -> dict[str, Any]:
    store = drafter._store
    return {"_store": lambda states, positions, slots: store(states, positions + 1, slots)}


def no_context(drafter: Any) -> dict[str, Any]:
    return {"_store": lambda states, positions, slots: None}


FAULTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    fault.__name__.replace("_", " "): fault
    for fault in (causal_block, other_mask, shorter_block, shifted_context, shifted_positions, no_context)
}


def bias_of_first(drafter: Any) -> dict[str, Any]:
    after = drafter.levels.after
    return {"levels": drafter.levels._replace(after=lambda states, tokens: after(states, 0 * tokens + tokens[:, :1]))}


def other_row(drafter: Any) -> dict[str, Any]:
    block = drafter.levels.block
    return {"levels": drafter.levels._replace(block=block._replace(first=1 - block.first))}


MARKOV_FAULTS = {"bias of first": bias_of_first, "other row": other_row}  # of drafters with a Markov head


def register() -> None:
    """Entry point ``sglang.srt.plugins``: to be called before the worker's modules are imported."""
    switch = Path(os.environ["EAGLE_TEST_FAULT"])
    healthy_verify = broken_verifier.healthy
    broken_verifier.sampling.verify_tree = lambda *arguments, **options: broken_verifier.FAULTS.get(
        switch.read_text(), healthy_verify
    )(*arguments, **options)
    from eagle_plugin.sglang import block_worker
    from eagle_plugin.sglang.block_drafter import BlockDrafter

    class Drafter(BlockDrafter):
        """Told from outside what to do wrong, also as it reads a prompt."""

        def _levels(self, batch: Any, state: Any, top_m: int) -> Any:
            with faulty(self):
                top = super()._levels(batch, state, top_m)
            if batch.b and isinstance(top, TopM):
                tell(batch, state, {"logp": top.logp[0].tolist(), "tokens": top.tokens[0].tolist()})
            return top

        def draft_tree(self, batch: Any, state: Any) -> Any:
            drafts = super().draft_tree(batch, state)
            if batch.b and self.levels.after is not None:
                tell(batch, state, {"shape": batch.shape, "nodes": paths_of(drafts, 0)})
            return drafts

        def extend(self, *arguments: Any) -> Any:
            with faulty(self):
                return super().extend(*arguments)

        def _draft_extend_for_prefill(self, *arguments: Any, **others: Any) -> Any:
            with faulty(self):
                return super()._draft_extend_for_prefill(*arguments, **others)

    def tell(batch: Any, state: Any, found: dict[str, Any]) -> None:
        found |= {"length": int(batch.prefix_lens[0]), "root": int(state.roots[0]), "requests": batch.b}
        with (switch.parent / "lists").open("a") as file:
            print(json.dumps(found), file=file)

    class faulty:  # noqa: N801
        """Around what the drafter does: the chosen fault, as attributes of the object."""

        def __init__(self, drafter: Any) -> None:
            fault = (FAULTS | MARKOV_FAULTS).get(switch.read_text(), lambda drafter: {})
            self.drafter, self.values = drafter, fault(drafter)

        def __enter__(self) -> None:
            self.before = {name: vars(self.drafter).get(name) for name in self.values}
            vars(self.drafter).update(self.values)

        def __exit__(self, *_: Any) -> None:
            for name, value in self.before.items():
                if value is None:
                    del vars(self.drafter)[name]
                else:
                    vars(self.drafter)[name] = value

    block_worker.BlockWorker.drafter_class = Drafter


def install(folder: Path) -> dict[str, str]:
    """Write the entry point into `folder`, with no fault chosen; returns the environment of the server."""
    environment = broken_verifier.install(folder, "block_lists")
    (folder / "lists").touch()
    return environment


class DraftedRound(NamedTuple):
    """A round's lists, and those of the reference."""

    is_right: bool
    levels: int


def compared(
    folder: Path, text: list[int], reference: DFlashReference, rows: int, near: float = 1e-3
) -> list[DraftedRound]:
    """For each round of a request alone, whether its lists are those of the reference; the lists are told once.

    near: how far logarithms may be off.
    """
    found = []
    for one in told(folder, text):
        n, logp, tokens = one["length"], torch.tensor(one["logp"]), torch.tensor(one["tokens"])
        wanted = reference.logits(text[: n + 1], rows)[: len(logp)].log_softmax(-1)
        found.append(DraftedRound(_alike(logp, tokens, wanted, near), len(logp)))
    return found


def told(folder: Path, text: list[int]) -> list[dict[str, Any]]:
    """What was told of the rounds of a request alone, whose text this is, but for those after its last token; once."""
    file = folder / "lists"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("")
    found = [one for one in found if one["length"] < len(text)]
    assert all(one["requests"] == 1 and text[one["length"]] == one["root"] for one in found)
    return found


def _alike(logp: Tensor, tokens: Tensor, wanted: Tensor, near: float) -> bool:
    """Whether these tokens have the logarithms that they should have, and no better ones were left out."""
    best = wanted.topk(logp.shape[1]).values
    off = (logp - best).abs().max(), (wanted.gather(1, tokens) - best).abs().max()
    return max(off) < near
