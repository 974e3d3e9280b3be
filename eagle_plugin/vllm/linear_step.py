"""Gated-delta-net layers in the captured functions of a decode step: verified trees leave there what the walk adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.gated_delta import Left
from eagle_plugin.runtime.graphs import StaticMemory
from eagle_plugin.vllm.attention import Rows
from eagle_plugin.vllm.linear_attention import LinearLayers, LinearMetadata


class LinearStep:
    """The linear layers of a target, if it has any, over padded batches. The padding has slot 0, which nobody has."""

    def __init__(self, linear: LinearLayers, groups: Mapping[str, int]) -> None:
        """groups: the KV cache group of each layer."""
        self._linear = linear
        self._groups: dict[int, list[str]] = {}
        for name in sorted(linear.names):
            self._groups.setdefault(groups[name], []).append(name)
        self._rooms: dict[str, Left] = {}

    def __len__(self) -> int:
        """How many groups of caches they have."""
        return len(self._groups)

    def allocate(self, memory: StaticMemory, most: int, rows: int) -> None:
        """Make the memory for up to `most` requests, whose trees have up to so many rows together."""
        for group in self._groups:
            memory.allocate(f"slots.{group}", most, torch.int64)
        self._rooms = {}  # frees what was there
        self._rooms = self._linear.rooms(rows)

    def begin(self, memory: Any, layers: Mapping[str, Any], padded_b: int) -> None:
        """Copy where the states of a step's requests are; layers: the metadata of the target's forward, by layer."""
        for group, names in self._groups.items():
            memory.put_padded(f"slots.{group}", layers[names[0]].slots, padded_b, 0)

    def layers(self, memory: StaticMemory, rows: Rows, padded_b: int) -> dict[str, LinearMetadata]:
        """The metadata of a forward over trees of the padded batch, by layer; what is left lies in memory."""
        found: dict[str, LinearMetadata] = {}
        for group, names in self._groups.items():
            metadata = LinearMetadata(rows, memory.view(f"slots.{group}", padded_b), rooms=self._rooms)
            found |= dict.fromkeys(names, metadata)
        return found

    def commit(self, memory: StaticMemory, rows: Rows, padded_b: int, accepted: Accepted) -> None:
        """Keep the states after the accepted paths of trees that have left what is in memory."""
        if not self._groups:
            return
        assert rows.tree is not None
        layers = self.layers(memory, rows, padded_b)
        for name, metadata in layers.items():
            metadata.left[name] = self._first(name, *rows.tree.ancestors.shape)
        self._linear.commit(layers, accepted)

    def lend(self, layers: Mapping[str, Any], b: int, width: int) -> None:
        """After a replayed forward over b trees: let the engine's metadata have what they left."""
        for name in self._rooms:
            layers[name].left[name] = self._first(name, b, width)

    def take(self, layers: Mapping[str, Any]) -> None:
        """Before a replayed walk: what the trees have left, in memory."""
        for name, room in self._rooms.items():
            for kept, values in zip(room, layers[name].left.pop(name), strict=True):
                if not _is_same_memory(kept, values):
                    kept[: values.shape[0] * values.shape[1]] = values.flatten(0, 1)

    def _first(self, name: str, b: int, width: int) -> Left:
        return Left(*(x[: b * width].view(b, width, *x.shape[1:]) for x in self._rooms[name]))


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata  # type: ignore[no-any-return]
