"""How a target's logits come from its last states, beside its output layer: by names of its configuration."""

from __future__ import annotations

from typing import Any


def readout_scale(config: Any) -> tuple[float, float | None]:
    """(factor, softcap) of logits = softcap * tanh(factor * lm_head(last) / softcap); config: of the text model."""
    factor = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
    factor /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return factor, float(softcap) if softcap else None
