"""Tests the kernels over the paged cache against torch: attention, store and move of rows, the start of a round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core import round_start as starting
from eagle_plugin.core import verify as verifying
from eagle_plugin.core.round_start import RoundStart
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.kernels import attention, attention_torch, bf16_linear, int8_linear, kv, round_start
from eagle_plugin.selftest.trial import TOLERANCE, Check, Trial, places_of


class _Cache:
    """Keys and values of a batch of requests in slots of random order; slots that nobody may see hold NaN."""

    def __init__(self, trial: Trial, prefixes: Tensor, tail: int, columns: int) -> None:
        """prefixes [b] int64; columns: of the slot table."""
        b, model = len(prefixes), trial.model
        slots = b * columns + 1
        self.table = (trial.permutation(slots - 1) + 1)[: b * columns].view(b, columns).int()
        self.rows = trial.permutation(b)
        shape = (slots, model.kv_heads, model.head_dim)
        dtype, self.scales = model.float8 or trial.dtype, trial.scales
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype, device=trial.device) for _ in range(2))
        for i, prefix in enumerate(prefixes.tolist()):
            used = self.table[self.rows[i], : prefix + tail].long()
            for name, cache in (("k_scale", self.k), ("v_scale", self.v)):
                new = trial.randn(len(used), *shape[1:], dtype=trial.dtype)
                cache[used] = trial.stored(new, self.scales.get(name))
        if model.latent:
            self.v = self.k[..., : model.latent]


def _prefixes(trial: Trial, most: int) -> Tensor:
    """No key before the tree, one, and up to the most, [b] int64."""
    lengths = trial.randint(most // 2, most, trial.sizes.batch)
    lengths[:2] = torch.tensor([0, 1], device=trial.device)[: len(lengths)]
    lengths[-1] = most
    return lengths


def _visible(trial: Trial, most: int) -> dict[str, Any]:
    """Window and chunk of the model's attention; a chunk ends inside the trees after the longest prefix, `most`."""
    model = trial.model
    return {"window": model.window, "chunk": min(model.chunk, most // 2 + 1)}


def _tree_attention(trial: Trial) -> None:
    """Verified trees, the levels of a draft, the accepted chain, and plain decoding."""
    shape, b = trial.model.tree, trial.sizes.batch
    verified = trial.tree(b, shape).ancestors
    nodes = min(max(shape.draft_slots, shape.topk), 64)
    level = trial.tree(b, shape._replace(width=nodes)).ancestors[:, -shape.topk :].contiguous()
    longest = shape.max_accept_length
    chain = chain_ancestors(longest, trial.device)
    cases = {
        "the verified tree": (verified, shape.width),
        "a level of the draft": (level, nodes),
        "the accepted chain": (chain.expand(b, -1).contiguous(), longest),
        "one token": (torch.ones(b, 1, dtype=torch.int64, device=trial.device), 1),
    }
    sizes = trial.sizes
    for most, columns in ((sizes.prefix, sizes.table), *filter(None, [sizes.narrow])):
        prefixes = _prefixes(trial, most)
        cache = _Cache(trial, prefixes, max(tail for _, tail in cases.values()), columns)
        for what, (ancestors, tail) in cases.items():
            _attend(trial, what, cache, prefixes, ancestors, tail, _visible(trial, most))


def _attend(
    trial: Trial,
    what: str,
    cache: _Cache,
    prefixes: Tensor,
    ancestors: Tensor,
    tail: int,
    seen: dict[str, Any],
) -> None:
    """seen: window and chunk."""
    model, (b, rows) = trial.model, ancestors.shape
    q = trial.randn(b * rows, model.heads, model.head_dim, dtype=trial.dtype)
    options = {"scale": model.head_dim**-0.5, "logit_cap": model.logit_cap, **cache.scales}
    found = attention.tree_attention(
        q, cache.k, cache.v, cache.table, cache.rows, prefixes, ancestors, tail=tail, **seen, **options
    )
    wanted = torch.empty_like(found)
    for i, prefix in enumerate(prefixes.tolist()):
        visible = attention_torch.tree_visible(ancestors[i], prefix, tail, **seen)
        slots = cache.table[cache.rows[i], : prefix + tail].long()
        own = slice(i * rows, (i + 1) * rows)
        wanted[own] = attention_torch.attend(q[own], cache.k[slots], cache.v[slots], visible, **options)
    trial.close(what, found, wanted, *TOLERANCE[trial.dtype])


def _extend_attention(trial: Trial) -> None:
    model, b, fresh = trial.model, trial.sizes.batch, 5
    lengths = _prefixes(trial, trial.sizes.prefix)[:b] + fresh
    cache = _Cache(trial, lengths - fresh, fresh, trial.sizes.table)
    seen = _visible(trial, trial.sizes.prefix)
    q = trial.randn(b * fresh, model.heads, model.head_dim, dtype=trial.dtype)
    starts = torch.arange(0, b * fresh, fresh, device=trial.device)
    options = {"scale": model.head_dim**-0.5, "logit_cap": model.logit_cap, **cache.scales}
    found = attention.extend_attention(
        q, cache.k, cache.v, cache.table, cache.rows, lengths, torch.full_like(lengths, fresh), starts,
        **seen, **options,
    )  # fmt: skip
    wanted = torch.empty_like(found)
    for i, length in enumerate(lengths.tolist()):
        visible = attention_torch.extend_visible(length, fresh, True, None, device=q.device, **seen)
        slots = cache.table[cache.rows[i], :length].long()
        own = slice(i * fresh, (i + 1) * fresh)
        wanted[own] = attention_torch.attend(q[own], cache.k[slots], cache.v[slots], visible, **options)
    trial.close("new tokens", found, wanted, *TOLERANCE[trial.dtype])


def _store_kv(trial: Trial) -> None:
    model, rows = trial.model, trial.sizes.batch * trial.model.width
    shape = (2 * rows, model.kv_heads, model.head_dim)
    caches = [trial.stored(trial.randn(*shape, dtype=trial.dtype), None) for _ in range(2)]
    wanted, scales = [cache.clone() for cache in caches], trial.scales
    slots = trial.permutation(2 * rows)[:rows].contiguous()
    fused = trial.randn(rows, 2 * model.kv_heads, model.head_dim, dtype=trial.dtype)  # rows of one projection
    new = [fused[:, : model.kv_heads], fused[:, model.kv_heads :]]
    kv.store_kv(caches[0], caches[1], slots, new[0], new[1], **scales)
    given = (scales.get("k_scale"), scales.get("v_scale"))
    for name, found, right, values, scale in zip(("keys", "values"), caches, wanted, new, given, strict=True):
        right[slots] = trial.stored(values, scale)
        trial.close(name, found, right, 0.0, 1e-30)


def _compact_kv(trial: Trial) -> None:
    """Keys and values of two layers; paths are ascending nodes, as those of a tree are."""
    model, b, shape = trial.model, trial.sizes.batch, trial.model.tree
    width, longest = shape.width, shape.max_accept_length
    slots = b * width + 7
    rows = (slots, model.kv_heads, model.head_dim)
    caches = [trial.stored(trial.randn(*rows, dtype=trial.dtype), None) for _ in range(4)]
    wanted = [cache.clone() for cache in caches]
    window = trial.permutation(slots)[: b * width].view(b, width).contiguous()
    lengths = trial.randint(1, longest + 1, b).int()
    lengths[-1] = longest
    nodes = 1 + trial.rand(b, width - 1).argsort(dim=1)[:, : longest - 1].sort(dim=1).values
    index = torch.cat([torch.zeros_like(nodes[:, :1]), nodes], dim=1).int()[:, :longest]
    index = index.where(torch.arange(longest, device=trial.device) < lengths[:, None], -1).contiguous()
    kv.compact_kv(*places_of(caches), window, index, lengths, slots=slots)
    for i, (found, right) in enumerate(zip(caches, wanted, strict=True)):
        verifying.compact_rows(right, window, index, lengths)
        trial.close(f"cache {i}", found, right, 0.0, 1e-30)


def _start_round(trial: Trial) -> None:
    """A batch that is smaller than the padded one, near the end of the context and far from it."""
    b, reach = trial.sizes.batch, trial.model.tree.reach
    padded_b, size, context = b + 2, b + 5, trial.sizes.table
    lengths = trial.randint(1, max(context - reach, 2), b)
    lengths[-1] = context - 2
    rows = trial.permutation(size)[:b].contiguous()
    table, keys = trial.randint(1, 10**6, size, context).int(), trial.randint(-(2**62), 2**62, size)
    sampling = trial.params(b)
    found, wanted = (RoundStart.empty(padded_b, reach, context, trial.device) for _ in range(2))
    for start, module in ((found, round_start), (wanted, starting)):
        start.table.fill_(-1)
        module.start_round(start, lengths, rows, table, keys, sampling)
    for name, x, y in zip(RoundStart._fields[:5], found[:5], wanted[:5], strict=True):
        trial.equal(name, x, y)
    for name, x, y in zip(SamplingParams._fields, found.sampling, wanted.sampling, strict=True):
        trial.close(name, x.float(), y.float(), 0.0, 1e-30)


def _int8_linear(trial: Trial) -> None:
    """Of the head on a CPU: 1 % is what the rounding of inputs and results to 8 bits explains."""
    weight = trial.randn(256, 512, dtype=torch.bfloat16)
    packed = int8_linear.pack(weight)
    if packed is None:  # there is no kernel here: the head runs on its own weights
        return
    x = trial.randn(4, 512, dtype=torch.bfloat16)
    wanted = x.float() @ packed.rounded(512).T
    trial.close("product", packed.linear(x).float(), wanted, 1e-2, 1e-2 * float(wanted.abs().max()))


def _bf16_linear(trial: Trial) -> None:
    """Of the target on a CPU: sums in float32, rounded once; torch's where there is no kernel of ours."""
    weight, x = (trial.randn(rows, 512, dtype=torch.bfloat16) for rows in (250, 13))
    bias = trial.randn(250, dtype=torch.bfloat16)
    wanted = x.float() @ weight.float().T + bias.float()
    trial.close("product", bf16_linear.linear(x, weight, bias).float(), wanted, 2**-7, 0.1)


# Where it runs: these have kernels on the CPU alone.
ON_CPU = (
    Check("extend_attention", _extend_attention),
    Check("int8_linear", _int8_linear),
    Check("bf16_linear", _bf16_linear),
)
CHECKS = (
    Check("tree_attention", _tree_attention),
    Check("store_kv", _store_kv),
    Check("compact_kv", _compact_kv),
    Check("start_round", _start_round),
)
