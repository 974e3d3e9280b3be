"""Which targets' own layers for multi-token prediction (MTP) our worker drafts with.

Such a layer is a draft head that lies in the target's checkpoint: it reads the next token's embedding and the target's
last hidden state, and has the target's embedding and output layer. vLLM's class for it computes.
"""

from __future__ import annotations

from typing import Any

from eagle_plugin.heads.vllm_classes import METHODS as HEAD_METHODS

METHOD = "mtp"  # of --speculative-config; vLLM renames qwen3_next_mtp and others to it
METHODS = (*HEAD_METHODS, METHOD)  # that our worker serves
# vLLM's classes whose layer has ordinary attention, and that give one state for the output layer and the next level.
SERVED = ("MiMoMTPModel", "Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP", "Glm4MoeMTPModel", "ExaoneMoeMTP")


def unserved_layers(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """What keeps our worker from drafting with the layers of this ``VllmConfig``, each with its sentence."""
    draft = vllm_config.speculative_config.draft_model_config
    name, count = draft.architecture, getattr(draft.hf_config, "n_predict", None)
    if name not in SERVED:
        return ((True, f"MTP layers {name}: only {', '.join(SERVED)} are served yet"),)
    return (
        (
            count != 1,
            f"MTP layers {name}: the checkpoint has {count}, only one, which drafts every level, is served yet",
        ),
        (
            vllm_config.parallel_config.data_parallel_size > 1 and draft.is_moe,
            "--data-parallel-size: it is not served with MTP layers of targets with experts yet, which may exchange "
            "tokens with other engines whenever they draft",
        ),
    )
