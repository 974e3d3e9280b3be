"""A plugin that breaks a test server: loses a part of the cache now and then, accepts less as time goes on, or has NaN.

`EAGLE_TEST_PLANTED` names the fault. What benchmarks/soak.py checks must find those that lose something.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

EVERY = 40  # calls per lost block or slot
DRIFT = 4000  # rounds after which nothing is accepted any more

VARIABLE = "EAGLE_TEST_PLANTED"


def lose_blocks_in_vllm() -> None:
    """One block of every `EVERY` lists of blocks is never free again."""
    from vllm.v1.core.block_pool import BlockPool

    calls, healthy = itertools.count(1), BlockPool.free_blocks

    def free_blocks(self: Any, ordered_blocks: Any) -> None:
        blocks = list(ordered_blocks)
        healthy(self, blocks[1:] if next(calls) % EVERY == 0 else blocks)

    BlockPool.free_blocks = free_blocks


def lose_slots_in_sglang() -> None:
    """One slot of every `EVERY` lists of slots is never free again."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    calls, healthy = itertools.count(1), TokenToKVPoolAllocator.free

    def free(self: Any, free_index: Any) -> None:
        healthy(self, free_index[1:] if next(calls) % EVERY == 0 else free_index)

    TokenToKVPoolAllocator.free = free


def lose_a_block_per_logprobs_in_vllm() -> None:
    """Each request that asks for four log probabilities takes one block away."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    healthy = KVCacheManager.free

    def free(self: Any, request: Any) -> None:
        healthy(self, request)
        if request.sampling_params is not None and request.sampling_params.logprobs == 4:
            self.block_pool.get_new_blocks(1)

    KVCacheManager.free = free


def accept_less_and_less() -> None:
    """A growing share of rounds accepts no draft."""
    from eagle_plugin.kernels import sampling

    rounds, healthy = itertools.count(1), sampling.verify_tree

    def verify_tree(*arguments: Any, **options: Any) -> Any:
        accepted = healthy(*arguments, **options)
        number = next(rounds)
        # A part of the rounds that grows from none to all, spread evenly.
        if int(number * number / (2 * DRIFT)) > int((number - 1) ** 2 / (2 * DRIFT)):
            accepted.lengths.fill_(1)
        return accepted

    sampling.verify_tree = verify_tree


def head_of_nan() -> None:
    """What the head says is not a number in every third forward."""
    from eagle_plugin.kernels import sampling

    calls, healthy = itertools.count(1), sampling.propose

    def propose(logp: Any, *arguments: Any, **options: Any) -> Any:
        broken = logp.new_full(logp.shape, float("nan")) if next(calls) % 3 == 0 else logp
        return healthy(broken, *arguments, **options)

    sampling.propose = propose


PLANTED = {
    "none": lambda: None,
    "nan": head_of_nan,
    "vllm leak": lose_blocks_in_vllm,
    "vllm leak of some requests": lose_a_block_per_logprobs_in_vllm,
    "sglang leak": lose_slots_in_sglang,
    "drift": accept_less_and_less,
}


def register() -> None:
    """Entry point of both engines: to be called before the worker's modules are imported."""
    PLANTED[os.environ[VARIABLE]]()


def install(folder: Path, fault: str) -> dict[str, str]:
    """Write this module's entry points into `folder`; returns the environment of the server."""
    info = folder / "planted_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted_faults\nVersion: 0\n")
    groups = ("sglang.srt.plugins", "vllm.general_plugins")
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\nplanted = planted_faults:register\n" for group in groups)
    )
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parent))), VARIABLE: fault}
