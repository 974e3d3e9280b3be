"""Checks the arguments of the torch path, with the sentences of csrc/bindings; the tests want the same from both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams

ANY = -1  # a size that is not checked


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def check(tensor: Tensor, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise TypeError for another dtype, ValueError for another shape; -1 in `shape` is any size."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} is {name_of(tensor.dtype)}, wanted {name_of(dtype)}: convert it with .to()")
    if tensor.dim() != len(shape) or any(w not in (ANY, s) for s, w in zip(tensor.shape, shape, strict=True)):
        wanted = ", ".join("*" if w == ANY else str(w) for w in shape)
        found = ", ".join(map(str, tensor.shape))
        raise ValueError(f"{name} has shape [{found}], wanted [{wanted}]: pass a tensor of that shape")


def check_all(*wanted: tuple[str, Tensor, str], **sizes: int) -> dict[str, int]:
    """`check` several tensors in turn; the third of each is its dtype and its sizes, as in "int64 b W".

    A size is a number, `*` for any, or a name. A name stands for the size that `sizes` gives it, else for that of the
    first tensor with this name. Returns the sizes of all names.
    """
    for name, tensor, kind in wanted:
        dtype, *shape = kind.split()
        check(tensor, name, getattr(torch, dtype), [int(n) if n.isdigit() else sizes.get(n, ANY) for n in shape])
        sizes |= {n: size for n, size in zip(shape, tensor.shape, strict=True) if n.isalpha()}
    return sizes


def check_values(sentence: str, values: Tensor, low: int, high: int | None, fix: str) -> None:
    """ValueError for a value outside low .. high (None: no end), on the CPU only: on a GPU the host would have to wait.

    sentence: how the error begins, with {at} for the place of the first such value in `values`, and {value}.
    """
    if not values.is_cpu:
        return
    wrong = ((values < low) | (values > (torch.iinfo(values.dtype).max if high is None else high))).nonzero()
    if not len(wrong):
        return
    at, end = tuple(wrong[0].tolist()), "or more" if high is None else f"to {high}"
    found = sentence.format(at=", ".join(map(str, at)), value=int(values[at]))
    raise ValueError(f"{found}, wanted {low} {end}: {fix}")


def check_sampling(sampling: SamplingParams, name: str, rows: int) -> None:
    """`check` the sampling parameters of so many rows."""
    for field, values, like in zip(sampling._fields, sampling, SamplingParams.greedy(0), strict=True):
        check(values, f"{name}.{field}", like.dtype, (rows,))
