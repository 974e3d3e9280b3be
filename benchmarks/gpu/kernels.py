"""Time the GPU kernels under CUDA graph replay, beside SGLang's own and FlashInfer's where they can be imported.

    python benchmarks/gpu/kernels.py [--shape llama-3-8b] [--dtype bfloat16] [--json FILE]

Tree attention of 16 and 64 nodes is also timed by FlashInfer and FlashAttention 3 where they can be imported. FILE has
the fastest of each case under "attention_choices".

A call is captured 20 times into one graph; a time is the median of 30 replays divided by 20, in microseconds. "Of the
copy bandwidth" compares the bytes that a call must read and write once, per second, with those of a copy of 512 MiB on
the same GPU. Data that fits in the L2 cache can exceed 100 %. Without a CUDA device the exit code is 2.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.attention_backends import choices, flash_attention, flash_attention_3, flashinfer_attention
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_end import end_of
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.kernels import sampling, tree
from eagle_plugin.kernels.attention import tree_attention

Call = Callable[[], Any]
# heads, key heads, head_dim, vocabulary
SHAPES = {"smollm2-135m": (9, 3, 64, 49152), "llama-3-8b": (32, 8, 128, 128256)}
INNER, REPLAYS = 20, 30
TOPK, WIDTH, MAX_ACCEPT_LENGTH = 4, 16, 4  # a tree of two levels, 15 of its 20 candidates and the root
TOP_M = 8
DEVIATIONS = (4.0, 1.0)  # of the logits: top-p 0.9 keeps some dozens of tokens, as of a language model, or most of them


class Row(NamedTuple):
    kernel: str
    case: str
    bytes: int  # read or written, each counted once
    calls: dict[str, Call]  # ours first
    shape: dict[str, int] = {}  # of tree attention


def microseconds(call: Call) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, plans and allocates before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(INNER):
            call()
    return statistics.median(1e3 * elapsed(graph.replay) / INNER for _ in range(REPLAYS))


def elapsed(call: Call) -> float:
    """Milliseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def copy_bandwidth() -> float:
    """Bytes read and written per microsecond."""
    source = torch.ones(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    # Not in a graph: on an H200 a copy reached 4.1 TB/s as a call and 2.7 as a node of one.
    times = [1e3 * elapsed(lambda: target.copy_(source)) for _ in range(REPLAYS)]
    return 2 * source.nbytes / statistics.median(times)


def attention_rows(
    shape: tuple[int, int, int, int], dtype: torch.dtype, batches: list[int], trees: Sequence[int] = (8, 16, 64)
) -> Iterator[Row]:
    heads, kv_heads, dim, _ = shape
    for b in batches:
        for context in (2048, 8192):
            for nodes in trees:
                keys = context + nodes
                like = {"dtype": dtype, "device": "cuda"}
                q = torch.randn(b * nodes, heads, dim, **like)
                k, v = (torch.randn(b * keys, kv_heads, dim, **like) for _ in range(2))
                table = torch.randperm(b * keys, device="cuda").int().view(b, keys)
                row = torch.arange(b, device="cuda")
                prefix = torch.full((b,), context, device="cuda")
                ancestors = (-1 ^ (-2 << torch.arange(nodes, device="cuda"))).repeat(b, 1)  # a chain
                ours = functools.partial(
                    tree_attention, q, k, v, table, row, prefix, ancestors, tail=nodes, scale=dim**-0.5
                )
                calls: dict[str, Call] = {"ours": ours}
                others = {"FlashInfer": flashinfer_attention(q, k, v, table, ancestors, heads, kv_heads)}
                if (attend := flash_attention_3()) is not None:
                    others["FlashAttention 3"] = flash_attention(attend, q, k, v, table, ancestors)
                for name, theirs in others.items():
                    if theirs is not None and agrees(name, ours, theirs):
                        calls[name] = theirs
                moved = 2 * b * (keys * kv_heads + nodes * heads) * dim * dtype.itemsize
                case = {"batch": b, "context": context, "nodes": nodes}
                yield Row("tree_attention", f"batch {b}, context {context}, {nodes} nodes", moved, calls, case)


def mixed_rows(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Row]:
    """Full batches of short requests, one with a long one; the slot table is as wide as a model's context."""
    heads, kv_heads, dim, _ = shape
    for longest, nodes in ((65536, 16), (1024, 16), (1024, 1)):
        prefix = torch.tensor([longest, *[1024] * 31], device="cuda")
        b, keys = len(prefix), int(prefix.sum()) + nodes * len(prefix)
        sizes = (b * nodes, heads), (keys, kv_heads), (keys, kv_heads)
        q, *cache = (torch.randn(*size, dim, dtype=dtype, device="cuda") for size in sizes)
        slots = torch.randperm(keys, device="cuda").int().split((prefix + nodes).tolist())
        table = torch.zeros(b, 131072, dtype=torch.int32, device="cuda")
        for row, own in zip(table, slots, strict=True):
            row[: len(own)] = own
        rows = torch.arange(b, device="cuda")
        ancestors = (-1 ^ (-2 << torch.arange(nodes, device="cuda"))).repeat(b, 1)  # a chain
        ours = functools.partial(tree_attention, q, *cache, table, rows, prefix, ancestors, tail=nodes, scale=dim**-0.5)
        moved = 2 * (keys * kv_heads + b * nodes * heads) * dim * dtype.itemsize
        contexts = "contexts 1024" if longest == 1024 else f"one context {longest}, others 1024"
        yield Row("tree_attention", f"batch {b}, {contexts} of 131072, {nodes} nodes", moved, {"ours": ours})


def agrees(name: str, ours: Call, theirs: Call) -> bool:
    """Whether another library runs this case; AssertionError if its result is another one."""
    try:
        other = theirs()
    except Exception as error:  # a library that is there but not for this GPU
        print(f"{name} left out: {(str(error) or type(error).__name__).splitlines()[0]}", file=sys.stderr)
        return False
    torch.testing.assert_close(ours(), other, rtol=2e-2, atol=2e-2)
    return True


def sglang_kernel(module: str, name: str) -> Callable[..., Any] | None:
    """A kernel of the engine: compiled at first use by SGLang 0.5.23, from sgl_kernel in older ones."""
    for place in (f"sglang.kernels.ops.speculative.{module}", "sgl_kernel"):
        try:
            return getattr(__import__(place, fromlist=[name]), name)
        except (ImportError, AttributeError):
            continue
    return None


def first_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """The first child and the next sibling of each node, -1 for none, [b, W] int64: the engine's form of a tree."""
    children, siblings = torch.full_like(parents, -1), torch.full_like(parents, -1)
    for child_row, sibling_row, row in zip(children, siblings, parents.tolist(), strict=True):
        last: dict[int, int] = {}
        for node, parent in enumerate(row):
            if parent < 0:
                continue
            if parent in last:
                sibling_row[last[parent]] = node
            else:
                child_row[parent] = node
            last[parent] = node
    return children.long(), siblings.long()


def topk_rows(vocab: int, batches: list[int]) -> Iterator[Row]:
    """The best tokens of the head's logits, a root's level and one of TOPK nodes per request; torch takes two calls."""
    for b in batches:
        for nodes in (1, TOPK):
            logits = torch.randn(b * nodes, vocab, device="cuda")
            calls: dict[str, Call] = {
                "ours": functools.partial(tree.topk_log_softmax, logits, TOP_M),
                "torch": lambda logits=logits: logits.log_softmax(-1).topk(TOP_M, -1),
            }
            yield Row("topk_log_softmax", f"{b * nodes} rows, vocabulary {vocab}", logits.nbytes, calls)


def tree_rows(vocab: int, batches: list[int]) -> Iterator[Row]:
    for b in batches:
        like: dict[str, Any] = {"device": "cuda"}
        table = tree.new_table(b, TOPK + TOPK * TOPK, "cuda")
        first = torch.rand(b, 1, TOPK, **like).log(), torch.randint(0, vocab, (b, 1, TOPK), **like)
        second = torch.rand(b, TOPK, TOPK, **like).log(), torch.randint(0, vocab, (b, TOPK, TOPK), **like)
        frontier = tree.grow_level(table, 0, 1, *first, None, TOPK)
        tree.grow_level(table, TOPK, 2, *second, frontier, 0)
        roots = torch.zeros(b, dtype=torch.int64, **like)
        select = functools.partial(tree.select_tree, table, roots, WIDTH)
        drafted = select()
        children, siblings = (x.cuda() for x in first_links(drafted.parents.cpu()))
        nodes = torch.arange(b * WIDTH, **like).view(b, WIDTH)  # the row of each node in the flat batch
        case = f"batch {b}, {WIDTH} nodes"

        calls: dict[str, Call] = {"ours": select}
        if build := sglang_kernel("tree", "build_tree_kernel_efficient"):
            parent_list = torch.arange(-1, TOPK, **like).repeat(b, 1)
            mask = torch.ones(b * WIDTH * WIDTH, dtype=torch.bool, **like)
            lens, positions = torch.full((b,), 100, **like), torch.empty(b * WIDTH, dtype=torch.int64, **like)
            links = [torch.full((b, WIDTH), -1, **like) for _ in range(3)]

            def theirs(parent_list=parent_list, table=table, rest=(lens, mask, positions, *links)) -> None:
                best = table.scores.topk(WIDTH - 1).indices.sort().values
                table.tokens.gather(1, best)
                build(parent_list, best, *rest, TOPK, 2, WIDTH, 1)  # 1: a mask of the tree alone

            calls["SGLang"] = theirs
        yield Row("select_tree", case, b * (table.scores.shape[1] * 20 + WIDTH * 28), calls)

        predicts = torch.zeros(b * WIDTH, dtype=torch.int32, **like)
        accept = torch.full((b, MAX_ACCEPT_LENGTH), -1, dtype=torch.int32, **like)
        count = torch.zeros(b, dtype=torch.int32, **like)
        walked = (predicts, accept, count, drafted.tokens, nodes, children, siblings)
        for deviation in DEVIATIONS:
            yield sampling_row(drafted, walked, vocab, deviation)


def sampling_row(drafted: tree.DraftTree, walked: tuple[Tensor, ...], vocab: int, deviation: float) -> Row:
    """Verification at temperature 0.8, top-p 0.9: ours from logits, the engine's with the filters that it needs first.

    The bytes are those of the logits of all nodes, which both read.
    """
    b = drafted.tokens.shape[0]
    logits = deviation * torch.randn(b * WIDTH, vocab, device="cuda")
    params = SamplingParams.of(b, 0.8, top_p=0.9, device="cuda")
    keys = torch.arange(b, device="cuda")
    ours = functools.partial(sampling.verify_tree, drafted, logits, params, keys, keys, MAX_ACCEPT_LENGTH)
    calls: dict[str, Call] = {"ours": ours}
    sample = sglang_kernel("sampling", "tree_speculative_sampling_target_only")
    try:
        from flashinfer.sampling import top_p_renorm_probs
    except ImportError:
        sample = None
    if sample is not None:
        coins, last, top_p = torch.rand(b, WIDTH, device="cuda"), torch.rand(b, device="cuda"), params.top_ps

        def theirs() -> None:
            p = torch.softmax(logits / 0.8, dim=-1)
            p = top_p_renorm_probs(p, top_p.repeat_interleave(WIDTH)).view(b, WIDTH, vocab)
            sample(*walked, coins, last, p, torch.zeros_like(p), 1.0, 1.0, True)

        calls["SGLang"] = theirs
    case = f"batch {b}, {WIDTH} nodes, logits of deviation {deviation:g}"
    return Row("verify_tree", case, logits.nbytes, calls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="whose heads and vocabulary")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: torch finds no CUDA device, wanted one: run this on a machine with an NVIDIA GPU and a CUDA build "
            "of torch; benchmarks/kernels.py times the CPU kernels",
            file=sys.stderr,
        )
        return 2
    torch.manual_seed(0)
    shape, bandwidth = SHAPES[options.shape], copy_bandwidth()
    about = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "shape": options.shape}
    about |= {"dtype": options.dtype, "copy_gb_s": round(bandwidth / 1e3)}
    shown = Table("kernel", "case", "microseconds", "of the copy bandwidth", title=", ".join(map(str, about.values())))
    found = []
    for rows in (
        attention_rows(shape, getattr(torch, options.dtype), options.batches),
        mixed_rows(shape, getattr(torch, options.dtype)),
        topk_rows(shape[3], options.batches),
        tree_rows(shape[3], options.batches),
    ):
        for row in rows:
            times = {name: microseconds(call) for name, call in row.calls.items()}
            share = row.bytes / bandwidth / times["ours"]
            shown.add_row(
                row.kernel, row.case, ", ".join(f"{name} {x:.1f}" for name, x in times.items()), f"{100 * share:.0f} %"
            )
            found.append({"kernel": row.kernel, "case": row.case, "us": times, "share_of_copy_bandwidth": share})
            found[-1] |= {"shape": row.shape} if row.shape else {}
            if options.json:  # as soon as a row is known
                report = about | {"rows": found, "attention_choices": choices(found)}
                write_output(options.json, [json.dumps(report, indent=1) + "\n"])
    Console(width=140).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
