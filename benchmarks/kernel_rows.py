"""The calls that `benchmarks/kernels.py` times: a kernel, and what a user has otherwise, on the same tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core import tree as tree_oracle
from eagle_plugin.core import verify as verify_oracle
from eagle_plugin.kernels import bf16_linear, int8_linear, kv, sampling, tree
from eagle_plugin.kernels.attention import tree_attention

Call = Callable[[], Any]
# heads, key heads, head_dim, vocabulary
SHAPES = {"smollm2-135m": (9, 3, 64, 49152), "llama-3-8b": (32, 8, 128, 128256)}


class Row(NamedTuple):
    """One line of the table."""

    kernel: str
    case: str
    ours: Call
    other: str  # what a user has otherwise
    theirs: Call
    bytes: int  # read or written, each once
    flops: int = 0


class Setting(NamedTuple):
    """What the rows are made for."""

    heads: int
    kv_heads: int
    dim: int
    vocab: int
    dtype: torch.dtype
    contexts: list[int]
    nodes: list[int]


def attention_rows(s: Setting) -> Iterator[Row]:
    """`tree_attention` on the paged cache, against torch's SDPA on gathered pages, a group's rows as one block."""
    group, scale = s.heads // s.kv_heads, s.dim**-0.5
    for context in s.contexts:
        for nodes in s.nodes:
            slots = context + nodes
            q = torch.randn(nodes, s.heads, s.dim).to(s.dtype)
            keys, values = (torch.randn(2 * slots, s.kv_heads, s.dim).to(s.dtype) for _ in range(2))
            table = torch.randperm(2 * slots)[:slots].int().view(1, slots)
            row, prefix = torch.zeros(1, dtype=torch.int64), torch.tensor([context])
            ancestors = -1 ^ (-2 << torch.arange(nodes))[None]  # a chain: node i sees nodes 0 to i
            mask = torch.ones(nodes, slots, dtype=torch.bool).tril(context).repeat_interleave(group, dim=0)
            index = table[0].long()

            def ours(q=q, k=keys, v=values, table=table, row=row, prefix=prefix, bits=ancestors) -> Tensor:
                return tree_attention(q, k, v, table, row, prefix, bits, tail=bits.shape[1], scale=scale)

            def gathered(q=q, keys=keys, values=values, index=index, mask=mask) -> Tensor:
                k, v = (x[index].transpose(0, 1)[None] for x in (keys, values))
                rows = q.view(-1, s.kv_heads, group, s.dim).transpose(0, 1).reshape(1, s.kv_heads, -1, s.dim)
                out = torch.nn.functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
                return out.view(s.kv_heads, -1, group, s.dim).transpose(0, 1).reshape(q.shape)

            torch.testing.assert_close(ours(), gathered(), rtol=2e-2, atol=2e-2)
            moved = 2 * (slots * s.kv_heads + nodes * s.heads) * s.dim * s.dtype.itemsize
            case = f"context {context}, {nodes} nodes"
            flops = 4 * nodes * s.heads * slots * s.dim
            yield Row("tree_attention", case, ours, "gather + SDPA", gathered, moved, flops)


def layer_rows(s: Setting) -> Iterator[Row]:
    """One token of each request in every layer, keys and values read from memory: no cache holds all layers'."""
    b, context, layers, block, scale = 16, 160, 30 if s.heads < 32 else 8, 32, s.dim**-0.5
    caches = [[torch.randn(b * context, s.kv_heads, s.dim).to(s.dtype) for _ in range(2)] for _ in range(layers)]
    blocks = torch.randperm(b * context // block).int().view(b, -1)
    table = (blocks[:, :, None] * block + torch.arange(block)).view(b, context).int()
    q, requests = torch.randn(b, s.heads, s.dim).to(s.dtype), torch.arange(b)
    prefix, bits = torch.full((b,), context - 1), torch.ones(b, 1, dtype=torch.int64)

    def ours(layer: list[Tensor]) -> Tensor:
        return tree_attention(q, *layer, table, requests, prefix, bits, tail=1, scale=scale)

    def gathered(layer: list[Tensor]) -> Tensor:
        k, v = (x[table.long()].transpose(1, 2) for x in layer)
        rows = q.view(b, s.kv_heads, -1, s.dim)
        return torch.nn.functional.scaled_dot_product_attention(rows, k, v, scale=scale).view(q.shape)

    def all_layers(attend: Callable[[list[Tensor]], Tensor]) -> None:
        for layer in caches:
            attend(layer)

    torch.testing.assert_close(ours(caches[0]), gathered(caches[0]), rtol=2e-2, atol=2e-2)
    moved = 2 * layers * b * (context * s.kv_heads + s.heads) * s.dim * s.dtype.itemsize
    case = f"{layers} layers, {b} requests of {context} tokens"
    run: list[Call] = [functools.partial(all_layers, attend) for attend in (ours, gathered)]
    yield Row(
        "tree_attention", case, run[0], "gather + SDPA", run[1], moved, 4 * layers * b * s.heads * context * s.dim
    )


def linear_rows(s: Setting) -> Iterator[Row]:
    """The output layer of a head with 16,384 tokens, in int8 against bfloat16; tests/kernels compares the results."""
    weight = (torch.randn(16384, s.heads * s.dim) * 0.05).bfloat16()
    packed = int8_linear.pack(weight)
    for rows in (1, 4, 16, 64) if packed is not None else ():
        x = torch.randn(rows, weight.shape[1]).bfloat16()
        if packed.serves(x):
            ours: Call = functools.partial(packed.linear, x)
            theirs: Call = functools.partial(torch.nn.functional.linear, x, weight)
            case, moved = f"{rows} rows of {x.shape[1]}", weight.numel() + 2 * rows * (len(weight) + x.shape[1])
            yield Row("int8_linear", case, ours, "bfloat16 weights", theirs, moved, 2 * rows * weight.numel())


def target_rows(s: Setting) -> Iterator[Row]:
    """A linear layer of a target, its weights read from memory: 64 layers in turn, larger than any cache together."""
    size = s.heads * s.dim
    weights = [torch.randn(4 * size, size).mul_(0.05).bfloat16() for _ in range(64 if size < 1024 else 8)]
    for rows in (1, 4, 8, 16, 32) if bf16_linear.native_kernel() is not None else ():
        x = torch.randn(rows, size).bfloat16()

        def all_layers(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor = x) -> None:
            for weight in weights:
                linear(x, weight)

        ours: Call = functools.partial(all_layers, bf16_linear.linear)
        theirs: Call = functools.partial(all_layers, torch.nn.functional.linear)
        weight_count = len(weights) * weights[0].numel()
        moved = 2 * weight_count + 2 * rows * 5 * size * len(weights)
        yield Row("bf16_linear", f"{rows} rows of {size}", ours, "torch", theirs, moved, 2 * rows * weight_count)


def tree_rows(s: Setting) -> Iterator[Row]:
    """Levels and selection, against the oracles in torch."""
    for b, topk, width in ((1, 4, 8), (32, 4, 16)):
        case = f"{b} x {width} nodes"
        candidates = tree.new_table(b, topk + topk * topk)
        first = torch.rand(b, 1, topk).log(), torch.randint(0, 999, (b, 1, topk))
        second = torch.rand(b, topk, topk).log(), torch.randint(0, 999, (b, topk, topk))
        frontier = tree.grow_level(candidates, 0, 1, *first, None, topk)
        level = (candidates, topk, 2, *second, frontier, topk)
        ours: Call = functools.partial(tree.grow_level, *level)
        theirs: Call = functools.partial(tree_oracle.grow_level, *level)
        torch.testing.assert_close(tuple(ours()), tuple(theirs()))
        yield Row("grow_level", case, ours, "torch", theirs, b * topk * topk * 40)
        roots = torch.zeros(b, dtype=torch.int64)
        ours = functools.partial(tree.select_tree, candidates, roots, width)
        theirs = functools.partial(tree_oracle.select_tree, candidates, roots, width)
        drafted = ours()
        torch.testing.assert_close(tuple(drafted), tuple(theirs()))
        yield Row("select_tree", case, ours, "torch", theirs, b * (topk + topk * topk) * 20 + b * width * 28)
        logits = torch.randn(b * topk, s.vocab)

        def sorted_top(logits: Tensor = logits, k: int = topk) -> tuple[Tensor, Tensor]:
            return tuple(logits.log_softmax(dim=-1).topk(k))

        ours = functools.partial(tree.topk_log_softmax, logits, topk)
        torch.testing.assert_close(ours()[0], sorted_top()[0])
        case = f"{len(logits)} x {s.vocab} logits"
        yield Row("topk_log_softmax", case, ours, "log_softmax + topk", sorted_top, logits.nbytes)


def cache_rows(s: Setting) -> Iterator[Row]:
    """Writes and moves in the paged cache, against indexing in torch."""
    layers, width = 30, 8
    for b in (1, 32):
        caches = [torch.randn(2 * b * width, s.kv_heads, s.dim).to(s.dtype) for _ in range(2 * layers)]
        window = torch.randperm(2 * b * width)[: b * width].view(b, width)
        index = torch.tensor([[0, 2, 5]], dtype=torch.int32).repeat(b, 1)
        lengths = torch.full((b,), 3, dtype=torch.int32)
        addresses = torch.tensor([cache.data_ptr() for cache in caches])
        row_bytes = caches[0][0].nbytes
        sizes = torch.full((len(caches),), row_bytes)

        def one_by_one(caches=caches, window=window, index=index, lengths=lengths) -> None:
            for cache in caches:
                verify_oracle.compact_rows(cache, window, index, lengths)

        moved = 2 * 2 * b * row_bytes * len(caches)  # two rows per request and cache, read and written
        ours: Call = functools.partial(kv.compact_kv, addresses, sizes, window, index, lengths)
        yield Row("compact_kv", f"{b} x 2 of {width} rows, {len(caches)} caches", ours, "torch", one_by_one, moved)
        slots = window.flatten()
        k, v = (torch.randn(b * width, s.kv_heads, s.dim).to(s.dtype) for _ in range(2))

        def indexed(caches=caches, slots=slots, k=k, v=v) -> None:
            caches[0][slots] = k
            caches[1][slots] = v

        ours = functools.partial(kv.store_kv, caches[0], caches[1], slots, k, v)
        yield Row("store_kv", f"{b * width} rows", ours, "torch", indexed, 4 * k.nbytes)


def sampling_rows(s: Setting) -> Iterator[Row]:
    """The walk at several settings and the children of a node, against a torch sampler over all nodes.

    Draws differ, so nothing is compared here; tests/kernels/test_sampling_kernels.py compares.
    """
    settings = {
        "greedy": (1, 1.0),
        "T 0.8": (2**30, 1.0),
        "T 0.8, top-p 0.95": (2**30, 0.95),
        "T 0.8, top-k 50": (50, 1.0),
    }
    width, steps, top_m = 8, 2, 128
    for b in (1, 32):
        logits = 3 * torch.randn(b * width, s.vocab)
        tree_of = tree.new_table(b, width)
        tree.grow_level(tree_of, 0, 1, torch.rand(b, 1, width).log(), torch.randint(0, 99, (b, 1, width)), None, 0)
        drafted = tree.select_tree(tree_of, torch.zeros(b, dtype=torch.int64), width)
        keys = torch.arange(b)
        for name, (top_k, top_p) in settings.items():
            params = sampling.SamplingParams.of(b, 0.8, top_k=top_k, top_p=top_p)
            ours: Call = functools.partial(sampling.verify_tree, drafted, logits, params, keys, keys, steps + 1)
            theirs: Call = functools.partial(sampled_by_torch, logits, top_k, top_p)
            visited = int(ours().lengths.sum()) * s.vocab * 4
            yield Row("verify_tree", f"{b} x {width} nodes, {name}", ours, "torch sampler", theirs, visited)
        logp, index = tree.topk_log_softmax(logits[: 4 * b], min(top_m, s.vocab))
        rows = params.for_rows(4)
        keys = torch.arange(4 * b)
        ours = functools.partial(sampling.propose, logp, index, rows, keys, keys, 4)
        theirs = functools.partial(torch.multinomial, logp.exp(), 1)
        yield Row("propose", f"{4 * b} rows of {logp.shape[1]}", ours, "multinomial", theirs, logp.nbytes * 4)


def sampled_by_torch(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """A token after every node, as a sampler without kernels draws it."""
    if top_k == 1:
        return logits.argmax(dim=-1)
    p = (logits / 0.8).softmax(dim=-1)
    if top_k >= logits.shape[1] and top_p == 1.0:
        return torch.multinomial(p, 1)
    p, order = p.sort(dim=-1, descending=True)
    p[:, top_k:] = 0
    p[p.cumsum(dim=-1) - p > top_p] = 0
    return order.gather(1, torch.multinomial(p, 1))


ROWS: list[Callable[[Setting], Iterator[Row]]] = [
    attention_rows, layer_rows, linear_rows, target_rows, tree_rows, cache_rows, sampling_rows
]  # fmt: skip
