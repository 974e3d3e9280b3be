"""Time the CPU kernels of a round: tree attention against page gather + torch SDPA, and the tree's bookkeeping.

    python benchmarks/kernels.py [--threads 1] [--dtype bfloat16]

Prints microseconds a call: the smallest of 30 means over 10 calls, so that a busy neighbour does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from eagle_plugin.kernels import kv, tree, verify
from eagle_plugin.kernels.attention import tree_attention
from eagle_plugin.kernels.loader import backend

HEADS, KV_HEADS, SIZE = 9, 3, 64  # SmolLM2-135M


def microseconds(call: Callable[[], object], repeats: int = 30, inner: int = 10) -> float:
    means = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        means.append((time.perf_counter() - start) / inner)
    return 1e6 * min(means)


def attention(rows: int, context: int, dtype: torch.dtype) -> tuple[float, float]:
    """Our kernel in place, and gathering the pages for torch's SDPA with a mask."""
    slots = context + rows
    q = torch.randn(rows, HEADS, SIZE).to(dtype)
    keys, values = (torch.randn(2 * slots, KV_HEADS, SIZE).to(dtype) for _ in range(2))
    table = torch.randperm(2 * slots)[:slots].int().view(1, slots)
    row, prefix = torch.zeros(1, dtype=torch.int64), torch.tensor([context])
    words = torch.tensor([[(1 << (i + 1)) - 1 for i in range(rows)]])
    mask = torch.ones(rows, slots, dtype=torch.bool).tril(context)
    index = table[0].long()

    def ours() -> torch.Tensor:
        return tree_attention(q, keys, values, table, row, prefix, words, tail=rows, scale=SIZE**-0.5)

    def gathered() -> torch.Tensor:
        k, v = keys[index].transpose(0, 1)[None], values[index].transpose(0, 1)[None]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=SIZE**-0.5, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    torch.testing.assert_close(ours(), gathered(), rtol=2e-2, atol=2e-2)
    return microseconds(ours), microseconds(gathered)


def bookkeeping(b: int, beam: int, width: int) -> dict[str, float]:
    """The calls of one round of two levels over b requests."""
    table = tree.new_table(b, beam + beam * beam)
    first = torch.rand(b, 1, beam).log(), torch.randint(0, 999, (b, 1, beam))
    second = torch.rand(b, beam, beam).log(), torch.randint(0, 999, (b, beam, beam))
    roots = torch.zeros(b, dtype=torch.int64)
    frontier = tree.grow_level(table, 0, 1, *first, None, beam)
    tree.grow_level(table, beam, 2, *second, frontier, 0)
    drafted = tree.select_tree(table, roots, width)
    targets = torch.randint(0, 999, (b, width))
    accepted = verify.verify_greedy(drafted.tokens, drafted.parents, targets, 3)
    caches = [torch.zeros(4 * b * width, KV_HEADS * SIZE, dtype=torch.bfloat16) for _ in range(60)]
    ptrs = torch.tensor([cache.data_ptr() for cache in caches])
    sizes = torch.full((60,), KV_HEADS * SIZE * 2)
    window = torch.arange(b * width).view(b, width)
    return {
        "grow_level": microseconds(lambda: tree.grow_level(table, 0, 1, *first, None, beam)),
        "select_tree": microseconds(lambda: tree.select_tree(table, roots, width)),
        "verify_greedy": microseconds(lambda: verify.verify_greedy(drafted.tokens, drafted.parents, targets, 3)),
        "compact_kv, 60 caches": microseconds(
            lambda: kv.compact_kv(ptrs, sizes, window, accepted.index, accepted.lengths)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console, dtype = Console(), getattr(torch, options.dtype)

    contexts = (512, 2000)
    title = f"tree_attention, {options.dtype}, {options.threads} thread(s), {backend()} kernels (gather + SDPA)"
    shown = Table("rows", *(f"context {context}, us" for context in contexts), title=title)
    for rows in (1, 4, 8, 16):
        cells = [attention(rows, context, dtype) for context in contexts]
        shown.add_row(str(rows), *(f"{ours:.0f} ({theirs:.0f})" for ours, theirs in cells))
    console.print(shown)

    shown = Table("call", "1 request, 8 nodes, us", "32 requests, 16 nodes, us", title="bookkeeping of a round")
    one, many = bookkeeping(1, 4, 8), bookkeeping(32, 4, 16)
    for name in one:
        shown.add_row(name, f"{one[name]:.1f}", f"{many[name]:.1f}")
    console.print(shown)


if __name__ == "__main__":
    main()
