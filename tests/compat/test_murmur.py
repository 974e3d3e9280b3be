"""The seeded-sampling hash against the published MurmurHash3 (x86, 32 bit), byte by byte."""

import struct

import pytest
import sgl_kernel  # noqa: F401  (defines torch.ops.sgl_kernel)
import torch
from hypothesis import given
from hypothesis import strategies as st

M32 = 0xFFFFFFFF


def murmur3_32(data: bytes, seed: int = 0) -> int:
    def rotate(x: int, r: int) -> int:
        return ((x << r) | (x >> (32 - r))) & M32

    h, tail = seed, len(data) & ~3
    for (k,) in struct.iter_unpack("<I", data[:tail]):
        h ^= (rotate(k * 0xCC9E2D51 & M32, 15) * 0x1B873593) & M32
        h = (rotate(h, 13) * 5 + 0xE6546B64) & M32
    if data[tail:]:
        k = int.from_bytes(data[tail:], "little")
        h ^= (rotate(k * 0xCC9E2D51 & M32, 15) * 0x1B873593) & M32
    h ^= len(data)
    h = ((h ^ h >> 16) * 0x85EBCA6B) & M32
    h = ((h ^ h >> 13) * 0xC2B2AE35) & M32
    return h ^ h >> 16


def test_the_reference_itself_gives_published_values():
    assert murmur3_32(b"test") == 0xBA6BD213
    assert murmur3_32(b"Hello, world!") == 0xC0363E43
    assert murmur3_32(b"The quick brown fox jumps over the lazy dog", 0x9747B28C) == 0x2FA826CD


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), max_size=3),
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.sampled_from([torch.uint64, torch.int64]),
)
def test_hash_of_seed_position_and_column(rows, columns, position_dtype):
    seed = torch.tensor([s for s, _ in rows], dtype=torch.uint64)
    position = torch.tensor([p for _, p in rows], dtype=position_dtype)
    out = torch.ops.sgl_kernel.murmur_hash32_cpu(seed, position, torch.tensor(columns, dtype=torch.int64))
    assert out.dtype == torch.uint32 and out.shape == (len(rows), len(columns))
    assert out.tolist() == [[murmur3_32(struct.pack("<QII", s, p, c)) for c in columns] for s, p in rows]


def test_int32_positions_and_signed_seeds():
    seed, position = torch.tensor([-1, 7]), torch.tensor([3, 4], dtype=torch.int32)
    out = torch.ops.sgl_kernel.murmur_hash32_cpu(seed, position, torch.arange(3))
    packed = [(2**64 - 1, 3), (7, 4)]
    assert out.tolist() == [[murmur3_32(struct.pack("<QII", s, p, c)) for c in range(3)] for s, p in packed]


def test_a_vocabulary_of_columns_agrees_at_its_ends():
    seed, position, columns = torch.tensor([42]), torch.tensor([1000]), torch.arange(128256)
    out = torch.ops.sgl_kernel.murmur_hash32_cpu(seed.to(torch.uint64), position, columns)
    for column in (0, 1, 65535, 65536, 128255):
        assert int(out[0, column]) == murmur3_32(struct.pack("<QII", 42, 1000, column))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="wanted \\[n\\], \\[n\\], \\[m\\]"):
        torch.ops.sgl_kernel.murmur_hash32_cpu(torch.zeros(2), torch.zeros(3), torch.zeros(4))
