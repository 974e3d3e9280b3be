"""The proxy of an attention backend is one of the wrapped class to the engine, and the plugin's own to us."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from eagle_plugin.sglang.attention import TreeAttention


class Backend:
    """One that masks pictures in prompts, as SGLang's Triton backend does."""

    mask: Any = None


def test_models_find_the_class_that_they_ask_for() -> None:
    """SGLang's Gemma 3 gives its mask for pictures to a backend of the class that knows masks, and to no other."""
    base = Backend()
    proxy: Any = TreeAttention(base)
    assert isinstance(proxy, Backend) and isinstance(proxy, TreeAttention) and type(proxy) is TreeAttention
    assert not isinstance(proxy, str)
    proxy.mask = 7
    assert base.mask == proxy.mask == 7
