"""The mark on vLLM's configuration that says that the plugin's worker serves; it travels to every process."""

from __future__ import annotations

from typing import Any

from eagle_plugin.core.shape import Shape

_SERVED = "_eagle_plugin_serves"


def mark_served(speculative_config: Any, shape: Shape) -> None:
    """Note in a vLLM ``SpeculativeConfig`` that our worker serves it with trees of these caps."""
    setattr(speculative_config, _SERVED, shape)


def served_shape(speculative_config: Any) -> Shape | None:
    """The caps of our worker's trees under this ``SpeculativeConfig``; None where it does not serve."""
    return getattr(speculative_config, _SERVED, None)


def is_served(speculative_config: Any) -> bool:
    """Whether our worker serves the configuration that this ``SpeculativeConfig`` is part of."""
    return served_shape(speculative_config) is not None
