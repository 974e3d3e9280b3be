"""Which draft heads our worker serves, by what vLLM has made of their config.json; block drafters for fewer targets."""

from __future__ import annotations

from collections import Counter
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
from eagle_plugin.heads.target_config import groups_by_kind
from eagle_plugin.heads.vllm_classes import SERVED
from eagle_plugin.vllm import mtp_support
from eagle_plugin.vllm.kv_connectors import connector_flag, planned_transfer

FULL = "full_attention"


def unserved_heads(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """Which heads are not served, each with its sentence."""
    draft = vllm_config.speculative_config.draft_model_config
    return (
        *_unserved_class(vllm_config),
        (
            # vLLM's V1 model runner serves no such head either: there the sentence of `check_cache_groups` says more.
            vllm_config.use_v2_model_runner and groups_of_head(vllm_config) > 1,
            f"draft head {draft.architecture}: vLLM puts the KV caches of its layers into several groups, and the "
            "plugin serves a head from one; with --disable-hybrid-kv-cache-manager it is served (layers with sliding "
            "windows then keep all tokens)",
        ),
    )


def groups_of_head(vllm_config: Any) -> int:
    """How many groups of KV caches vLLM will have a head's layers in, as far as both config.json say it."""
    model, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    layers = Counter(getattr(model.hf_text_config, "layer_types", None) or [])
    if len(layers) < 2 or vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return 1
    if model.attention_chunk_size is not None:  # beside it vLLM has no groups with drafts
        return 1
    count = draft.hf_text_config.num_hidden_layers
    own = Counter((getattr(draft.hf_text_config, "layer_types", None) or [FULL] * count)[:count])
    if _width(draft) != _width(model):  # blocks of another size are of other groups
        own = Counter({f"{kind} of the head": n for kind, n in own.items()})
    groups = groups_by_kind(layers + own)
    return sum(min(n, groups[kind]) for kind, n in own.items())


def _width(model: Any) -> int:
    """Numbers of the keys of a token in one layer."""
    width: int = model.get_total_num_kv_heads() * model.get_head_size()
    return width


def _unserved_class(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """Heads of other classes, and block drafters where they are not served."""
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
        (model.is_hybrid or model.use_mla, f"target {name}: it is not served with block drafters yet"),
        (
            model.is_multimodal_model and not getattr(model.multimodal_config, "language_model_only", False),
            f"target {name}: its images are not served with block drafters yet; with --language-model-only its "
            "texts are",
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
