"""Faults for a block drafter in vLLM: each gives the attribute of the drafter to change, and its value."""

from __future__ import annotations

from typing import Any

from eagle_plugin.runtime.parallel_levels import Block, HeadLevels

BLOCK = 8


def causal_block(drafter: Any) -> tuple[str, Any]:
    return "_is_causal", True


def other_mask(drafter: Any) -> tuple[str, Any]:
    return "levels", HeadLevels(block=Block(3, BLOCK))


def shorter_block(drafter: Any) -> tuple[str, Any]:
    return "levels", HeadLevels(block=Block(2, BLOCK - 1))


def shifted_context(drafter: Any) -> tuple[str, Any]:
    store = drafter._store
    return "_store", lambda states, positions, slots: store(states.roll(1, dims=0), positions, slots)


def shifted_positions(drafter: Any) -> tuple[str, Any]:
    store = drafter._store
    return "_store", lambda states, positions, slots: store(states, positions + 1, slots)
