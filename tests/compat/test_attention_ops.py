"""torch.ops.sgl_kernel attention over the paged cache, against one softmax per query in plain Python loops."""

import math

import pytest
import sgl_kernel  # noqa: F401  (defines torch.ops.sgl_kernel)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SLOTS, WIDTH = 64, 24


class Cache:
    """b requests of random lengths, each position of which has a slot of its own."""

    def __init__(self, seed: int, lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
        self.random = torch.Generator().manual_seed(seed)
        self.heads, self.dim, self.dtype, self.lens = heads, dim, dtype, lens
        self.k, self.v = (self.draw(SLOTS, kv_heads, dim) for _ in range(2))
        self.table = torch.zeros(len(lens) + 2, WIDTH, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 2, generator=self.random)[: len(lens)]
        slots = torch.randperm(SLOTS, generator=self.random).to(torch.int32)
        for row, length in zip(self.rows.tolist(), lens, strict=True):
            self.table[row, :length], slots = slots[:length], slots[length:]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def slots(self, i: int) -> list[int]:
        return self.table[self.rows[i], : self.lens[i]].tolist()


def attend(cache: Cache, query: torch.Tensor, slots: list[int], scale: float, cap: float, sinks) -> torch.Tensor:
    """One query [Hq, D] over the given slots; float64, one head at a time."""
    out = torch.zeros(cache.heads, cache.dim, dtype=torch.float64)
    group = cache.heads // cache.k.shape[1]
    for head in range(cache.heads):
        logits = [float(query[head].double() @ cache.k[s, head // group].double()) * scale for s in slots]
        if cap > 0:
            logits = [cap * math.tanh(x / cap) for x in logits]
        weights = [math.exp(x) for x in logits]
        total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
        for weight, slot in zip(weights, slots, strict=True):
            out[head] += weight / total * cache.v[slot, head // group].double()
    return out


@st.composite
def caches(draw, min_len: int = 1):
    kv_heads = draw(st.sampled_from([1, 2]))
    lens = draw(st.lists(st.integers(min_len, 16), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Cache(draw(st.integers(0, 1 << 20)), lens, kv_heads * draw(st.integers(1, 3)), kv_heads, 16, dtype)


options = st.fixed_dictionaries(
    {
        "cap": st.sampled_from([0.0, 5.0]),
        # counts the query itself, 0 = none, as the engine passes it; below 0: a chunk
        "window": st.sampled_from([0, 1, 4, -1, -3, -6]),
        "with_sinks": st.booleans(),
    }
)


def nearest(slots: list[int], window: int) -> list[int]:
    """What the last of these slots' token sees of them; they are at positions 0, 1, ..."""
    if window < 0:
        return slots[(len(slots) - 1) // -window * -window :]
    return slots[-window if window else None :]


def decode(cache, query, output, key, value, loc, scale, cap, window, sinks, **changed):
    b = len(cache.lens)
    arguments = dict(
        q=query, k=cache.k, v=cache.v, k_scale=1.0, v_scale=1.0, out=output, key=key, value=value, loc=loc,
        scratch=torch.zeros(b, cache.heads, 8, cache.dim + 1), table=cache.table, rows=cache.rows,
        lens=torch.tensor(cache.lens), scale=scale, cap=cap, cross=False, window=window, encoder_lens=None, sinks=sinks,
    )  # fmt: skip
    torch.ops.sgl_kernel.decode_attention_cpu(*(arguments | changed).values())


@settings(deadline=None, max_examples=60)
@given(caches(), options, st.booleans())
def test_decode_stores_the_new_key_and_attends_to_the_sequence(cache, option, stored_before):
    b, scale = len(cache.lens), 0.3
    q, out = cache.draw(b, cache.heads, cache.dim), torch.zeros(b, cache.heads, cache.dim, dtype=cache.dtype)
    sinks = torch.randn(cache.heads, generator=cache.random) if option["with_sinks"] else None
    key, value = (cache.draw(b, cache.k.shape[1], cache.dim) for _ in range(2))
    loc = torch.tensor([cache.slots(i)[-1] for i in range(b)])
    expected_k = cache.k.clone()
    if stored_before:
        key = value = None
    else:
        expected_k[loc] = key
    decode(cache, q, out, key, value, loc, scale, option["cap"], option["window"], sinks)
    assert torch.equal(cache.k, expected_k)
    for i in range(b):
        slots = cache.slots(i)
        expected = attend(cache, q[i], nearest(slots, option["window"]), scale, option["cap"], sinks)
        torch.testing.assert_close(out[i].double(), expected, atol=TOLERANCE[cache.dtype], rtol=TOLERANCE[cache.dtype])


def extend(cache, query, output, extend_lens, starts, scale, cap, window, sinks, mask=None, **changed):
    arguments = dict(
        q=query, key=None, value=None, out=output, k=cache.k, v=cache.v, k_scale=1.0, v_scale=1.0, table=cache.table,
        rows=cache.rows, lens=torch.tensor(cache.lens), extend_lens=torch.tensor(extend_lens, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32), longest=max(extend_lens), scale=scale, cap=cap, cross=False,
        window=window, encoder_lens=None, sinks=sinks, mask=mask, causal=True,
    )  # fmt: skip
    torch.ops.sgl_kernel.extend_attention_cpu(*(arguments | changed).values())


@settings(deadline=None, max_examples=60)
@given(caches(), options, st.booleans(), st.data())
def test_extend_sees_the_prefix_and_earlier_or_ancestor_tokens(cache, option, as_tree, data):
    scale = 0.3
    if as_tree:  # a verify step: the same number of nodes for every request
        extend_lens = [data.draw(st.integers(1, min(cache.lens)))] * len(cache.lens)
    else:
        extend_lens = [data.draw(st.integers(1, n)) for n in cache.lens]
    starts = [sum(extend_lens[:i]) for i in range(len(extend_lens))]
    q = cache.draw(sum(extend_lens), cache.heads, cache.dim)
    out = torch.zeros_like(q)
    sinks = torch.randn(cache.heads, generator=cache.random) if option["with_sinks"] else None
    ancestors = []  # per request, per node: the nodes that it sees
    for e in extend_lens:
        seen: list[set[int]] = []
        for node in range(e):
            parent = data.draw(st.integers(0, node - 1)) if node else None
            seen.append({node} | (seen[parent] if parent is not None else set()))
        ancestors.append(seen)
    mask = None
    if as_tree:
        mask = torch.tensor([j in seen for tree in ancestors for seen in tree for j in range(len(tree))])
    extend(cache, q, out, extend_lens, starts, scale, option["cap"], option["window"], sinks, mask)
    for i, (e, start) in enumerate(zip(extend_lens, starts, strict=True)):
        slots, prefix = cache.slots(i), cache.lens[i] - e
        for j in range(e):
            if as_tree:
                seen = slots[:prefix] + [slots[prefix + node] for node in sorted(ancestors[i][j])]
            else:
                seen = slots[: prefix + j + 1]
            expected = attend(cache, q[start + j], nearest(seen, option["window"]), scale, option["cap"], sinks)
            tolerance = TOLERANCE[cache.dtype]
            torch.testing.assert_close(out[start + j].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def cache():
    return Cache(0, [5, 9], 4, 2, 16, torch.float32)


REFUSED = {
    "cross attention": ({"cross": True}, "encoder-decoder"),
    "encoder lengths": ({"encoder_lens": torch.tensor([3, 3])}, "encoder-decoder"),
    "key scale": ({"k_scale": 0.5}, "cache scales 0.5 and 1.0, wanted 1.0"),
    "value scale": ({"v_scale": 2.0}, "cache scales 1.0 and 2.0, wanted 1.0"),
    "fp8 cache": ({"k": torch.zeros(SLOTS, 2, 16).to(torch.float8_e4m3fn)}, "float8_e4m3fn cache, wanted both"),
    "half": ({"q": torch.zeros(2, 4, 16).half(), "k": torch.zeros(SLOTS, 2, 16).half()}, "float16.*wanted both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_cannot_do_is_refused(cache, case):
    changed, message = REFUSED[case]
    q = torch.zeros(2, 4, 16)
    with pytest.raises(NotImplementedError, match=message):
        decode(cache, q, torch.zeros_like(q), None, None, torch.tensor([0, 1]), 1.0, 0.0, 0, None, **changed)
    with pytest.raises(NotImplementedError, match=message):
        extend(cache, q, torch.zeros_like(q), [1, 1], [0, 1], 1.0, 0.0, 0, None, **changed)


def test_a_row_outside_the_table_is_refused(cache):
    q = torch.zeros(2, 4, 16)
    with pytest.raises(ValueError, match="wanted"):
        decode(
            cache,
            q,
            torch.zeros_like(q),
            None,
            None,
            torch.tensor([0, 1]),
            1.0,
            0.0,
            0,
            None,
            rows=torch.tensor([0, 9]),
        )
