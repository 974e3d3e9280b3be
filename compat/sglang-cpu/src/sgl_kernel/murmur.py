"""MurmurHash3 (32 bit) over (seed, position, column), the random source of SGLang's seeded sampling."""

import torch

# int32 arithmetic wraps exactly like uint32; the constants are written as the engine's kernel has them.
_C1, _C2, _ADD = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_MIX1, _MIX2 = 0x85EBCA6B, 0xC2B2AE35


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _shift_right(h: torch.Tensor, bits: int) -> torch.Tensor:
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)  # int32 shifts carry the sign down: mask it off


def _rotate_left(h: torch.Tensor, bits: int) -> torch.Tensor:
    return (h << bits).bitwise_or_(_shift_right(h, 32 - bits))


def _key(word: torch.Tensor) -> torch.Tensor:
    return _rotate_left(word * _signed(_C1), 15).mul_(_signed(_C2))


def _absorb(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _rotate_left(h ^ key, 13).mul_(5).add_(_signed(_ADD))


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32-bit halves of 64-bit integers, as int32."""
    halves = tensor.contiguous().view(torch.int32).view(-1, 2)  # little-endian, as every CPU served here
    return halves[:, 0], halves[:, 1]


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return uint32 [n, m], the hash of (seed[i], positions[i], columns[j]).

    seed, positions: integers [n], columns: integers [m]; the seed's 64 bits and the low 32 of the others are used, as
    in sglang.kernels.ops.sampling.murmur_hash. Raises ValueError on other shapes.
    """
    if seed.dim() != 1 or seed.shape != positions.shape or columns.dim() != 1:
        raise ValueError(
            f"seed, positions, columns have shapes {tuple(seed.shape)}, {tuple(positions.shape)}, "
            f"{tuple(columns.shape)}, wanted [n], [n], [m]."
        )
    seed_low, seed_high = _words(seed if seed.dtype == torch.uint64 else seed.to(torch.int64))
    position = _words(positions if positions.dtype == torch.uint64 else positions.to(torch.int64))[0]
    column = _words(columns if columns.dtype == torch.uint64 else columns.to(torch.int64))[0]
    row = torch.zeros_like(seed_low)
    for word in (seed_low, seed_high, position):
        row = _absorb(row, _key(word))
    column_key = _key(column)
    out = torch.empty((seed.numel(), columns.numel()), dtype=torch.int32)
    for i in range(seed.numel()):  # row by row: a vocabulary of int32 stays in the cache through the dozen passes
        h = _absorb(row[i], column_key).bitwise_xor_(16)  # 16 bytes hashed
        h.bitwise_xor_(_shift_right(h, 16)).mul_(_signed(_MIX1))
        h.bitwise_xor_(_shift_right(h, 13)).mul_(_signed(_MIX2))
        torch.bitwise_xor(h, _shift_right(h, 16), out=out[i])
    return out.view(torch.uint32)
