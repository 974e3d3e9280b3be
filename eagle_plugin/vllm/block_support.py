"""Which draft heads our worker serves, by what vLLM has made of their config.json; block drafters for fewer targets."""

from __future__ import annotations

from typing import Any

from eagle_plugin.heads.block_config import ARCHITECTURE, METHOD, levels_of_block
from eagle_plugin.heads.vllm_classes import SERVED


def unserved_heads(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """Which heads are not served, each with its sentence."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    if vllm_config.speculative_config.method != METHOD:
        return ((draft.architecture not in SERVED, f"draft head {draft.architecture}: not one of {', '.join(SERVED)}"),)
    name = model.architectures[0]
    return (
        (
            draft.architecture != ARCHITECTURE,
            f"block drafter {draft.architecture}: only {ARCHITECTURE} is served yet",
        ),
        (
            model.is_hybrid or model.use_mla or model.is_multimodal_model,
            f"target {name}: it is not served with block drafters yet",
        ),
        (vllm_config.kv_transfer_config is not None, "--kv-transfer-config: it is not served with block drafters yet"),
    )


def levels_of_drafter(speculative: Any) -> int:
    """The levels that a block drafter lists at once."""
    config = speculative.draft_model_config.hf_config.to_dict()
    return levels_of_block(config, speculative.num_speculative_tokens)
