"""Which draft heads our worker serves, by what vLLM has made of their config.json; block drafters for fewer targets."""

from __future__ import annotations

from typing import Any

from eagle_plugin.heads.block_config import (
    ARCHITECTURES,
    MARKOV,
    METHOD,
    METHODS,
    kind_of,
    levels_of_block,
    options_of,
)
from eagle_plugin.heads.vllm_classes import SERVED
from eagle_plugin.vllm import mtp_support
from eagle_plugin.vllm.kv_connectors import connector_flag, planned_transfer


def unserved_heads(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """Which heads are not served, each with its sentence."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    method = vllm_config.speculative_config.method
    if method == mtp_support.METHOD:
        return mtp_support.unserved_layers(vllm_config)
    if method not in METHODS:
        return ((draft.architecture not in SERVED, f"draft head {draft.architecture}: not one of {', '.join(SERVED)}"),)
    name = model.architectures[0]
    return (
        (
            draft.architecture not in ARCHITECTURES.values(),
            f"block drafter {draft.architecture}: only {' and '.join(ARCHITECTURES.values())} are served yet",
        ),
        (
            vllm_config.speculative_config.dspark_draft_topk is not None,
            "dspark_draft_topk: it belongs to vLLM's chains",
        ),
        (
            model.is_hybrid or model.use_mla or model.is_multimodal_model,
            f"target {name}: it is not served with block drafters yet",
        ),
        (
            planned_transfer(vllm_config) is not None,
            f"{connector_flag(vllm_config)}: it is not served with block drafters yet",
        ),
    )


def unlisted_by_v1(vllm_config: Any) -> list[str]:
    """What vLLM has in its V2 model runner only, but for what ours adds to V1."""
    found: list[str] = vllm_config._get_v1_model_runner_unsupported_features()
    return [what for what in found if what != f"{MARKOV} speculative decoding"]


def method_of(speculative: Any) -> str:
    """The method of a ``SpeculativeConfig`` as the user named it; of a served one, `plan_as_dflash` may have changed
    it."""
    is_markov = speculative.method == METHOD and kind_of(_config_of(speculative)) == MARKOV
    return MARKOV if is_markov else speculative.method


def plan_as_dflash(speculative: Any) -> None:
    """Let vLLM's V1 model runner, which knows no DSpark, plan a DSpark drafter's tokens and load it as it does DFlash.

    Both are a block after the same context; what is drafted of it is ours. Of DSpark's key for the layers that are read
    that runner knows nothing either.
    """
    if speculative.method != MARKOV:
        return
    layers = options_of(_config_of(speculative)).get("target_layer_ids")
    if layers is not None:
        speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = [i + 1 for i in layers]
    speculative.method = METHOD


def levels_of_drafter(speculative: Any) -> int:
    """The levels that a block drafter lists at once."""
    return levels_of_block(_config_of(speculative), speculative.num_speculative_tokens)


def _config_of(speculative: Any) -> dict[str, Any]:
    config: dict[str, Any] = speculative.draft_model_config.hf_config.to_dict()
    return config
