"""The marks on vLLM's configuration, which travel to every process: that the plugin's worker serves, the file in which
it reports, and what it tests before the first request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_plugin.core.shape import Shape

if TYPE_CHECKING:
    from eagle_plugin.selftest.launch import Subject

_SERVED = "_eagle_plugin_serves"
_REPORT = "_eagle_plugin_report"
_SUBJECT = "_eagle_plugin_selftest"


def mark_served(speculative_config: Any, shape: Shape) -> None:
    """Note in a vLLM ``SpeculativeConfig`` that our worker serves it with trees of these caps."""
    setattr(speculative_config, _SERVED, shape)


def served_shape(speculative_config: Any) -> Shape | None:
    """The caps of our worker's trees under this ``SpeculativeConfig``; None where it does not serve."""
    return getattr(speculative_config, _SERVED, None)


def caps_of(speculative_config: Any) -> Shape:
    """The same where it serves."""
    shape = served_shape(speculative_config)
    assert shape is not None
    return shape


def is_served(speculative_config: Any) -> bool:
    """Whether our worker serves the configuration that this ``SpeculativeConfig`` is part of."""
    return served_shape(speculative_config) is not None


def mark_report(speculative_config: Any, path: Path) -> None:
    """Note in a vLLM ``SpeculativeConfig`` the file in which our worker reports what its policy does."""
    setattr(speculative_config, _REPORT, path)


def report_path(speculative_config: Any) -> Path | None:
    """That file; None where there is none."""
    return getattr(speculative_config, _REPORT, None)


def mark_subject(speculative_config: Any, subject: Subject) -> None:
    """Note in a vLLM ``SpeculativeConfig`` that our worker tests the round of the real models, and of what."""
    setattr(speculative_config, _SUBJECT, subject)


def test_subject(speculative_config: Any) -> Subject | None:
    """That subject; None where nothing is tested."""
    return getattr(speculative_config, _SUBJECT, None)
