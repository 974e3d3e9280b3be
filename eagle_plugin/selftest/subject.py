"""Describes what the self-test of a server depends on, and tests the kernels that its worker would run on a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from eagle_plugin.selftest import record, suite
from eagle_plugin.selftest.decision import Gather, agree, decide, told
from eagle_plugin.selftest.shapes import ModelShape


class Subject(NamedTuple):
    """What the self-test of a server depends on, beside its devices. All values can be written as JSON."""

    device: str  # "cuda" or "cpu"
    devices: int  # one per rank
    head_dims: Sequence[int]  # of both models
    shape: Mapping[str, Any]  # fields of a `ModelShape`: what the kernels see
    real_round: Mapping[str, Any]  # what else decides about the round of the real models
    engine: str  # name and version


def round_key(subject: Subject, device: torch.device | str) -> dict[str, Any]:
    """Under what the result of the real round is kept."""
    return record.key_of("round", device, {**subject.shape, **subject.real_round}, subject.engine)


def failed_kernels(subject: Subject, device: torch.device, gather: Gather, logger: logging.Logger) -> list[str]:
    """Why our worker must not serve this subject on a device; empty if it may.

    Runs the kernels on the subject's shapes, unless a record says what they gave. The record of a real round that
    failed at an earlier start counts too. gather and logger as for `decide`.
    """
    shape = ModelShape(**subject.shape)
    kernels = record.key_of("kernels", device, subject.shape, subject.engine)
    if reasons := decide(kernels, lambda: suite.differences(device, shape), gather, logger):
        return reasons
    earlier = record.read(round_key(subject, device))
    return told(agree(earlier.reasons if earlier else [], gather))
