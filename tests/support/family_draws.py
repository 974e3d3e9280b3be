"""Sampled text of an SGLang server with trees beside plain decoding's, for targets that say few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import broken_verifier
from gtest import p_values
from sampling_requests import draw

from eagle_plugin.bench.servers import Server

LEAST_P = 1e-7


def check_draws(plain: Server, plugin: Server, settings: list[dict[str, Any]]) -> list[Any]:
    """Texts of both settings are of plain decoding's distribution; returns what plain decoding drew."""
    expected = draw(plain, settings, 500)
    for ours, theirs in zip(draw(plugin, settings, 300), expected, strict=True):
        found = p_values(ours, theirs)
        assert min(found.values()) > LEAST_P, found
    return expected


def check_distribution(plain: Server, plugin: Server, folder: Path, settings: list[dict[str, Any]]) -> None:
    """`check_draws`. The control: a verifier that takes every temperature for 1; folder: where the plugin's can be
    broken (`broken_verifier.install`)."""
    expected = check_draws(plain, plugin, settings)
    broken_verifier.choose(folder, "temperature one")
    try:
        (broken,) = draw(plugin, settings[1:], 300)
    finally:
        broken_verifier.choose(folder, "none")
    control = p_values(broken, expected[1])
    assert min(control.values()) < LEAST_P**2, control
