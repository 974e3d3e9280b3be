"""Draws random batches on a server's own rows and cache slots, before anybody else uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter
from eagle_plugin.sglang.pools import Pool, pools_of
from eagle_plugin.sglang.verifier import TreeVerifier

SEED = 2026
MOST_DRAWN = 4096  # slots whose keys and values are drawn at once: what is drawn takes memory that a server has not
MOST_PREFIX = 48  # tokens of a request before its round


class Parts(NamedTuple):
    """What a round runs on."""

    decode_round: DecodeRound
    reader: BatchReader
    verifier: TreeVerifier
    drafter: TreeDrafter
    shape: Shape
    vocabulary: int
    draft_vocabulary: int
    req_to_token: Tensor  # [P, C] int32: the engine's table, of which no row is in use
    rng_keys: Tensor  # [P] int64: of the requests' random numbers
    allocator: Any  # of cache slots
    caches: list[tuple[Tensor, Pool]]  # [slots, heads, dim]: keys and values of all layers of both models
    dtype: torch.dtype  # of the target; that of a cache may be one of 8-bit floats, or of their bytes
    quantization: str | None = None  # the engine's name for how the target is quantised


def parts_of(worker: Any) -> Parts:
    """What the rounds of a `TreeWorker` run on."""
    runner, drafter = worker.target_worker.model_runner, worker.draft_worker
    caches = []
    for engines_pool in (runner.token_to_kv_pool, drafter.draft_runner.token_to_kv_pool):
        for pool in pools_of(engines_pool):
            caches += [(cache, pool) for cache in (*pool.buffers.k_buffer, *pool.buffers.v_buffer)]
    return Parts(
        decode_round=worker._round,
        reader=worker._reader,
        verifier=worker._verifier,
        drafter=drafter,
        shape=worker.shape,
        vocabulary=runner.model_config.vocab_size,
        draft_vocabulary=drafter._draft_vocabulary(),
        req_to_token=worker.req_to_token_pool.req_to_token,
        rng_keys=worker._keys.table,
        allocator=worker.token_to_kv_pool_allocator,
        caches=caches,
        dtype=runner.dtype,
        quantization=runner.model_config.quantization,
    )


class RandomBatches:
    """Draws the same batches on every rank; rows and slots are free again afterwards."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.device = parts.req_to_token.device
        # On the CPU: ranks on different GPUs have to draw the same.
        self.generator = torch.Generator().manual_seed(SEED)
        self._template: DraftState | None = None

    def requests(self, padded_b: int) -> int:
        """At most so many requests, fewer where the table or the cache is small."""
        need = MOST_PREFIX // 4 + self._parts.shape.reach
        free = self._free() // need
        return max(1, min(padded_b, free, len(self._parts.req_to_token) - 1))

    def room(self, b: int) -> int:
        """The longest prefix for which b requests have slots."""
        return max(2, min(MOST_PREFIX, self.longest(b)))

    def longest(self, b: int) -> int:
        """The longest prefix for which b requests have slots, 0 if they have none."""
        free = self._free() // b if b < len(self._parts.req_to_token) else 0
        return max(min(free, self._parts.req_to_token.shape[1]) - self._parts.shape.reach - 1, 0)

    def _free(self) -> int:
        """Slots that whole pages have room for."""
        return int(self._parts.allocator.available_size()) - self._page()

    def _page(self) -> int:
        return int(self._parts.allocator.page_size)

    @contextlib.contextmanager
    def borrowed(self, b: int, positions: int) -> Iterator[Tensor]:
        """Rows [b] int64 of the table that name a random free slot for each position; keys and values are random.

        Of more than `MOST_DRAWN` slots they repeat.
        """
        parts = self._parts
        need = b * positions
        page = self._page()
        slots = _allocated(parts.allocator, -(-need // page) * page)
        if slots is None:
            raise RuntimeError(f"the KV cache has no {need} free slots for the self-test: give the server more of it")
        rows = 1 + self.permutation(len(parts.req_to_token) - 1)[:b]  # row 0 is that of padding
        kept = parts.req_to_token[rows].clone(), parts.rng_keys[rows].clone()
        try:
            used = slots[self.permutation(len(slots))][:need]
            parts.req_to_token[rows, :positions] = used.view(b, positions).int()
            parts.rng_keys[rows] = self.randint(-(2**62), 2**62, b)
            for cache, pool in parts.caches:
                n = min(need, MOST_DRAWN)
                drawn = torch.randn(n, *cache.shape[1:], generator=self._on_device(), device=self.device)
                values = as_stored(drawn, cache, pool)
                for some in pool.slots(used).split(n):
                    cache[some] = values[: len(some)]
            yield rows
        finally:
            parts.req_to_token[rows], parts.rng_keys[rows] = kept
            parts.allocator.free(slots)

    def schedule(self, rows: Tensor, lengths: Tensor, greedy: bool) -> Any:
        """What the reader reads of an SGLang ``ScheduleBatch``."""
        b, device = len(rows), self.device
        temperatures = 0.5 + torch.rand(b, 1, generator=self.generator)
        top_ps = 0.8 + 0.2 * torch.rand(b, generator=self.generator)
        top_ks = torch.full((b,), 1 if greedy else self._parts.vocabulary, dtype=torch.int32)
        sampling = SimpleNamespace(
            temperatures=torch.ones(b, 1, device=device) if greedy else temperatures.to(device),
            top_ks=top_ks.to(device),
            top_ps=torch.ones(b, device=device) if greedy else top_ps.to(device),
            min_ps=torch.zeros(b, device=device),
            is_all_greedy=greedy,
        )
        return SimpleNamespace(seq_lens=lengths, req_pool_indices=rows, sampling_info=sampling, multimodal_inputs=None)

    def state(self, b: int) -> DraftState:
        """A random state of the head, of b requests."""
        if self._template is None:
            *_, self._template = self._parts.decode_round.padding_round(self._parts.shape)
        like = self._template
        top_m = like.head.top.tokens.shape[1]
        logits = torch.randn(b, self._parts.draft_vocabulary, generator=self.generator) * 3
        logp, tokens = (values.to(self.device) for values in logits.log_softmax(dim=1).topk(top_m))
        hidden = torch.randn(b, *like.head.hidden.shape[1:], generator=self.generator)
        top = TopM(logp.to(like.head.top.logp.dtype), tokens)
        hidden = hidden.to(self.device, like.head.hidden.dtype)
        return DraftState(HeadState(top, hidden), self.randint(0, self._parts.vocabulary, b))

    def sequences(self, lengths: Tensor, roots: Tensor) -> list[list[int]]:
        """The committed tokens of requests; where they are long enough, an earlier root has the token before it."""
        sequences = [self.randint(0, self._parts.vocabulary, length).tolist() for length in lengths.tolist()]
        for text, root in zip(sequences, roots.tolist(), strict=True):
            if len(text) > 3:
                text[1:3] = [text[-1], root]
        return sequences

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 numbers, low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def permutation(self, n: int) -> Tensor:
        """0 .. n - 1 in random order, int64."""
        return torch.randperm(n, generator=self.generator).to(self.device)

    def _on_device(self) -> torch.Generator:
        seed = int(torch.randint(0, 2**31, (), generator=self.generator))
        return torch.Generator(self.device).manual_seed(seed)


def _allocated(allocator: Any, count: int) -> Tensor | None:
    """So many free slots, whole pages, also of the pool of sliding windows; None where there are fewer.

    Where that pool has pages, SGLang's allocator gives slots to requests alone.
    """
    if allocator.page_size == 1 or not isinstance(allocator, SWATokenToKVPoolAllocator):
        return allocator.alloc(count)
    if allocator.available_size() < count:
        return None
    slots = allocator.full_attn_allocator.alloc(count)
    allocator.set_full_to_swa_mapping(slots, allocator.swa_attn_allocator.alloc(count))
    return slots


def as_stored(values: Tensor, cache: Tensor, pool: Pool) -> Tensor:
    """Numbers as a cache of the pool holds them: of 8-bit floats SGLang keeps the bytes."""
    return values.to(cache.dtype) if cache.is_floating_point() else values.to(pool.buffers.dtype).view(cache.dtype)
