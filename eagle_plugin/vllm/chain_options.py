"""Options of vLLM that say how a chain is drafted or verified, and nothing of what is answered: trees have none.

vLLM's other ways of verification are lossy, or accept as a benchmark says (`synthetic.py`).
"""

from __future__ import annotations

from typing import Any

# Of a ``SpeculativeConfig``: the value that is of chains alone, and vLLM's default.
OF_CHAINS: dict[str, tuple[Any, Any]] = {
    "disable_padded_drafter_batch": (True, False),
    "use_local_argmax_reduction": (True, False),
    "rejection_sample_method": ("block", "standard"),
}


def drop_chain_options(speculative_config: Any) -> list[str]:
    """Give these options of a ``SpeculativeConfig`` that our worker serves their defaults; returns what was set."""
    dropped = []
    for name, (value, default) in OF_CHAINS.items():
        if getattr(speculative_config, name) == value:
            setattr(speculative_config, name, default)
            dropped.append(f"{name} {value}" if isinstance(value, str) else name)
    return dropped
