"""Draws random inputs of a model's shapes on one device, and notes what differed from the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels.float8 import quantised
from eagle_plugin.selftest.shapes import ModelShape, Sizes

# Beside one rounding of the result: the weights of attention are rounded to the cache's dtype before they meet the
# values. The same numbers as in the property tests of the kernels.
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (1 / 400, 2e-3),
    torch.bfloat16: (1 / 50, 1e-2),
}


class Trial:
    """What one check of the self-test draws its inputs from and reports to."""

    def __init__(self, model: ModelShape, sizes: Sizes, device: torch.device | str, seed: int) -> None:
        self.model, self.sizes, self.device = model, sizes, torch.device(device)
        self.dtype = model.torch_dtype
        self.vocabulary = min(model.vocabulary, sizes.vocabulary)
        self.draft_vocabulary = min(model.draft_vocabulary, self.vocabulary)
        self.differences: list[str] = []  # one sentence each
        self.worst = 0.0  # the largest difference of a float, as a part of what is allowed
        self.compared = 0  # values
        self._generator = torch.Generator(self.device).manual_seed(seed)

    # Random inputs, all on the device.

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self._generator, device=self.device, dtype=dtype)

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 numbers, low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def permutation(self, n: int) -> Tensor:
        """0 .. n - 1 in random order, int64."""
        return torch.randperm(n, generator=self._generator, device=self.device)

    def parents(self, b: int, width: int) -> Tensor:
        """Parents [b, width] int32 of random trees; one node in eight is padding."""
        below = (self.rand(b, width) * torch.arange(width, device=self.device)).long()
        parents = below.where(self.rand(b, width) > 0.125, -1).int()
        parents[:, 0] = -1
        return parents

    def tree(self, b: int, shape: Shape) -> DraftTree:
        """Random trees [b, W] with tokens of the target and without sampled nodes."""
        width = shape.width
        parents = self.parents(b, width)
        made = DraftTree.padding(self.randint(0, self.vocabulary, b), width)
        made = made._replace(parents=parents, tokens=self.randint(0, self.vocabulary, b, width))
        for node in range(1, width):
            parent = parents[:, node : node + 1].long()
            known = parent >= 0
            bit = torch.ones_like(parent) << node
            own = made.ancestors.gather(1, parent.clamp(min=0)) | bit
            made.ancestors[:, node : node + 1] = own.where(known, bit | 1)
            depth = made.depths.gather(1, parent.clamp(min=0)) + 1
            made.depths[:, node : node + 1] = depth.where(known, 0)
        return made

    def params(self, rows: int) -> SamplingParams:
        """Sampling parameters of which some are off; the first row is greedy, the second one has all filters."""

        def some(values: Tensor, off: float) -> Tensor:
            return values.where(self.rand(rows) < 0.5, off)

        top_ks = self.randint(2, max(self.vocabulary // 2, 3), rows).where(self.rand(rows) < 0.5, self.vocabulary)
        made = SamplingParams.of(rows, device=self.device)._replace(
            temperatures=0.3 + self.rand(rows),
            top_ks=top_ks.int(),
            top_ps=some(0.5 + self.rand(rows) / 2, 1.0),
            min_ps=some(self.rand(rows) / 8, 0.0),
        )
        filtered = SamplingParams.of(1, 0.8, top_k=50, top_p=0.9, min_p=0.02, device=self.device)
        for values, first, second in zip(made, SamplingParams.greedy(1, self.device), filtered, strict=True):
            values[:1], values[1:2] = first, second
        return made

    # The cache of keys and values, where the model's is one of 8-bit floats.

    @property
    def scales(self) -> dict[str, Tensor]:
        """Of keys and of values, as `kernels.attention` takes them; empty where the cache has none."""
        if self.model.float8 is None:
            return {}
        return {name: torch.full((1,), x, device=self.device) for name, x in (("k_scale", 0.02), ("v_scale", 0.3))}

    def stored(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Keys or values as the cache holds them."""
        return x if self.model.float8 is None else quantised(x, scale, self.model.float8)

    # What differed.

    def equal(self, what: str, found: Tensor, wanted: Tensor) -> None:
        """Integers have to be equal."""
        self.compared += wanted.numel()
        if not self._same_kind(what, found, wanted):
            return
        wrong = (found != wanted).flatten()
        if count := int(wrong.sum()):
            at = int(wrong.int().argmax())
            a, b = found.flatten()[at].item(), wanted.flatten()[at].item()
            self.differences.append(f"{what}: {count} of {wrong.numel()} values differ, such as {a} in place of {b}")

    def close(self, what: str, found: Tensor, wanted: Tensor, rtol: float, atol: float) -> None:
        """Floats may differ by atol + rtol * |wanted|; infinities and NaN have to be equal."""
        self.compared += wanted.numel()
        if not self._same_kind(what, found, wanted) or not wanted.numel():
            return
        a, b = found.double(), wanted.double()
        same = (a == b) | (a.isnan() & b.isnan())
        off = (a - b).abs()
        allowed = atol + rtol * b.abs()
        part = (off / allowed).masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
        worst = float(part.amax())
        self.worst = max(self.worst, worst)
        if worst > 1:
            at = int(part.argmax())
            x, y, limit = (values.flatten()[at].item() for values in (a, b, allowed))
            count = int((part > 1).sum())
            self.differences.append(
                f"{what}: {count} of {b.numel()} values differ, most {x:.6g} in place of {y:.6g} "
                f"where {limit:.2g} is allowed"
            )

    def _same_kind(self, what: str, found: Tensor, wanted: Tensor) -> bool:
        if found.shape == wanted.shape and found.dtype == wanted.dtype:
            return True
        kinds = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (found, wanted)]
        self.differences.append(f"{what}: a tensor of {kinds[0]} in place of {kinds[1]}")
        return False


def places_of(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Addresses and bytes per row of caches [slots, ...], [n] int64 each on their device, for `compact_kv`."""
    device = caches[0].device
    addresses = torch.tensor([cache.data_ptr() for cache in caches], device=device)
    return addresses, torch.tensor([cache.stride(0) * cache.element_size() for cache in caches], device=device)


class Check(NamedTuple):
    """One thing that is tested."""

    name: str
    run: Callable[[Trial], None]
    # Where rounding of a float decides about an integer: a draw right at the border of two tokens. Such a check has to
    # fail with other random inputs too.
    rounding_decides: bool = False
